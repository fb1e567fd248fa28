import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import deltarule
from deltarule.nn import MIXERS
from promised import PROMISED

ROOT = Path(__file__).parents[1]
EXTRAS = ("triton", "transformers", "matplotlib", "tyro", "rich", "hypothesis", "pytest")

# To the code that follows, the extras are not installed.
WITHOUT_EXTRAS = f"import sys; sys.modules |= dict.fromkeys({EXTRAS})\n"


def python(code: str) -> str:
    """Standard output of a fresh interpreter that runs the code with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_have_docstrings():
    for module in (deltarule, importlib.import_module("deltarule.ops")):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                assert found.__doc__, name


def test_import_brings_in_no_extra():
    code = (
        "import sys, torch; before = set(sys.modules); import deltarule.ops, json; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    imported = {name.partition(".")[0] for name in json.loads(python(code))}
    assert "deltarule" in imported
    assert not imported & set(EXTRAS)


def test_a_public_name_brings_in_pytorch_and_the_command_line_alone_does_not():
    code = """
import sys
import deltarule, deltarule.cli
assert deltarule.cli.main(["--help"]) == 0 and deltarule.cli.main(["trian"]) == 2
assert "torch" not in sys.modules and "delta_rule" in dir(deltarule)
assert deltarule.delta_rule is deltarule.ops.delta_rule
assert deltarule.nn.GatedDeltaNet and deltarule.models.CausalLM
assert "recurrence" in dir(sys.modules["torch"].ops.deltarule)
"""
    python(code)


def test_operators_run_and_layers_and_models_import_without_any_extra():
    code = """
import torch
from deltarule import delta_rule
q, k, v = torch.randn(3, 1, 5, 2, 4).unbind()
out = delta_rule(q, k, v, beta=torch.rand(1, 5, 2), normalize_qk=True)
assert out.o.shape == (1, 5, 2, 4) and out.o.isfinite().all()
import deltarule.nn, deltarule.models, deltarule.train, deltarule.cli
"""
    python(WITHOUT_EXTRAS + code)


def test_version_names_and_type_information_are_those_of_the_installed_package():
    assert deltarule.__version__ == importlib.metadata.version("deltarule")
    assert deltarule.__version__ == project()["version"]
    assert (Path(deltarule.__file__).parent / "py.typed").exists()
    assert sorted(deltarule.__all__) == deltarule.__all__
    assert all(hasattr(deltarule, name) for name in deltarule.__all__)


def test_constraints_hold_what_the_project_asks_for_and_every_installed_dependency():
    """What is installed for the tests, and all that it asks for, has one version each."""
    pinned, seen, queue = constraints(), set(), []
    assert pinned["torch"] == "2.13.0"
    for requirement in requirements():
        if requirement.name != "deltarule":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
            queue.append(requirement.name)
    while queue:
        name = canonicalize_name(queue.pop())
        if name in seen or not installed(name):
            continue
        seen.add(name)
        wanted = map(Requirement, importlib.metadata.requires(name) or [])
        queue += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    # torch's GPU libraries come with versions that torch itself fixes.
    missing = {name for name in seen - set(pinned) if not name.startswith(("nvidia-", "cuda-"))}
    assert not missing


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    groups = [project()["dependencies"], *project()["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def constraints(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_no_test_is_skipped_for_want_of_what_the_extra_promises():
    files = [*(ROOT / "tests").rglob("*.py")]
    skips = {
        name: file
        for file in files
        for name in re.findall(r"""importorskip\(["'](\w+)""", file.read_text())
    }
    assert {"triton", "pyarrow", "tyro", "hypothesis"} <= PROMISED
    assert not {name: file for name, file in skips.items() if name in PROMISED}


def test_the_lowest_versions_are_those_that_the_project_asks_for():
    """A version that is never installed could be promised and not work."""
    lowest = constraints("constraints-lowest.txt")
    skipped = {"deltarule", "ruff", "mypy", "import-linter", "pytest-xdist", "zensical"}
    for group in ("train", "data", "gpu", "test", None):
        lines = project()["optional-dependencies"][group] if group else project()["dependencies"]
        for requirement in map(Requirement, lines):
            if requirement.name not in skipped:
                least = next(s.version for s in requirement.specifier if s.operator == ">=")
                assert Version(lowest[requirement.name]) == Version(least), requirement.name


@pytest.mark.parametrize("name", MIXERS)
def test_constructors_of_layers_document_their_arguments(name):
    layer = MIXERS[name]
    documented = f"{inspect.getdoc(layer)}\n{inspect.getdoc(layer.__init__)}".partition("Args:")[2]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^ *([\w, ]+):", documented, re.M))))
    assert set(inspect.signature(layer).parameters) <= named


CALLS = """
import torch
from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import GatedDeltaNet
layer, x = GatedDeltaNet(32, num_heads=2), torch.randn(1, 2, 32)
model = CausalLM(ModelConfig(vocab_size=9, hidden_size=32, num_layers=1, num_heads=2,
                             layer_types="kda"))
reveal_type(layer(x))
reveal_type(model(torch.zeros(1, 2, dtype=torch.long)))
"""


def test_calls_of_layers_and_models_have_types_in_a_process(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache"), "calls.py"],
        cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT / "src")}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    first, second, *_ = done.stdout.splitlines()
    assert "tuple[torch._tensor.Tensor, deltarule.nn.state.State]" in first
    assert "tuple[torch._tensor.Tensor, deltarule.nn.state.ModelState]" in second
