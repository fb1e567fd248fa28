"""What the package alone can do, without any extra: run by CI where nothing else is installed.

`python tests/base_only.py`; it needs no pytest.
"""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import deltarule
from deltarule.models import CausalLM, ModelConfig, next_token_loss
from deltarule.models.bytes import encode
from deltarule.nn import MIXERS

EXTRAS = {"tyro", "rich", "matplotlib", "transformers", "pyarrow", "pytest", "hypothesis"}
# PyTorch for a GPU brings Triton itself.
OPTIONAL = EXTRAS | {"triton", "accelerate", "peft", "tokenizers", "lm_eval"}


def modules_import() -> int:
    """Every module of the package; what is missing may only be an extra."""
    names = [module.name for module in pkgutil.walk_packages(deltarule.__path__, "deltarule.")]
    count, broken = 0, []
    for name in names:
        if name == "deltarule.__main__":
            continue
        try:
            importlib.import_module(name)
            count += 1
        except ImportError as error:
            if str(error.name).partition(".")[0] not in OPTIONAL and ".hf" not in name:
                broken.append(f"{name}: {error}")
    assert not broken, broken
    return count


def mixer_runs(name: str, folder: Path) -> None:
    """Train a model of this mixer for a step, save it, load it, generate."""
    config = ModelConfig(
        vocab_size=257, hidden_size=32, num_layers=1, num_heads=2, layer_types=name, mlp_size=32
    )
    model = CausalLM(config)
    tokens = torch.tensor([encode("a text to learn", begin=True)])
    next_token_loss(model(tokens[:, :-1])[0], tokens[:, 1:]).backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    model.save(folder)
    expected = model.generate([[97]], max_new_tokens=3, temperature=0)
    assert CausalLM.load(folder).generate([[97]], max_new_tokens=3, temperature=0) == expected


def command_says_what_is_missing() -> None:
    """One line that names the extra; the version needs none."""
    line = [sys.executable, "-m", "deltarule"]
    assert (
        "deltarule" in subprocess.run([*line, "--version"], capture_output=True, text=True).stdout
    )
    done = subprocess.run([*line, "rules"], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "deltarule[train]"' in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def main() -> None:
    """All of it."""
    there = sorted(name for name in EXTRAS if importlib.util.find_spec(name) is not None)
    assert not there, f"not an environment of the base alone: {there}"
    print(f"{modules_import()} modules import from {Path(deltarule.__file__).parent}")
    with tempfile.TemporaryDirectory() as folder:
        for name in MIXERS:
            mixer_runs(name, Path(folder))
    print(f"{len(MIXERS)} mixers step, are saved, loaded and generate; torch {torch.__version__}")
    command_says_what_is_missing()


if __name__ == "__main__":
    main()
