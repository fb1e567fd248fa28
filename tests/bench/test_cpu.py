import json
import sys

import pytest
import torch

from bench import cpu
from deltarule.train import extra
from deltarule.train.extra import MissingExtraError

SMALL = cpu.Shape(batch=1, tokens=96, heads=2, channels=16)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    pytest.importorskip("transformers", reason="the benchmark's peer is the extra 'hf'")
    output = tmp_path_factory.mktemp("bench") / "new folder" / "cpu.json"
    report = cpu.main(output, 2, timed=SMALL, checked=SMALL)
    assert json.loads(output.read_text()) == report
    return report


def test_both_sides_compute_the_same(report):
    for comparison in report["comparisons"]:
        for side in ("deltarule", "transformers"):
            errors = comparison[side]["relative_errors"]
            names = ("q", "k", "v", "beta", "log_decay")
            assert set(errors) == {"o", *(f"grad {x}" for x in names)}
            assert max(errors.values()) < 5e-6


def test_figures_are_complete(report):
    assert [one["name"] for one in report["comparisons"]] == ["gated_delta_rule", "kda"]
    for comparison in report["comparisons"]:
        for side in (comparison["deltarule"], comparison["transformers"]):
            assert side["median"] == sum(side["seconds"]) / 2
            # At the least q, k and v.
            assert side["saved_bytes"] >= 3 * 4 * 96 * 2 * 16
    # A line for each side, and one for both sides of each case.
    table = cpu.table(report).splitlines()
    assert [line.split(" | ")[1] for line in table[4:8]] == ["deltarule", "transformers"] * 2
    assert table[9].startswith("gated delta rule: ")


def test_inputs_are_the_same_on_every_call():
    first, second = (cpu.draw(SMALL, decay_per_channel=True)[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (first["log_decay"] <= 0).all()


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"deltarule\[hf\]"):
        cpu.main(None, 1, timed=SMALL, checked=SMALL)


def test_a_failure_inside_transformers_is_not_mistaken_for_its_absence(monkeypatch):
    def broken(module):
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr(extra.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="tokenizers"):
        cpu.transformers_version()


def saves_twice(inputs):
    # Both products save x (once counted); the first saves its own result for the second.
    square = inputs["x"] * inputs["x"]
    return square * inputs["x"][:10]


def saves_behind_a_view(inputs):
    # exp saves its result, the product saves both factors: the detached one keeps all of x alive.
    return inputs["x"][:1].exp() * inputs["x"][:1].detach()


@pytest.mark.parametrize(("operator", "rows"), [(saves_twice, 20), (saves_behind_a_view, 11)])
def test_saved_bytes_counts_each_whole_storage_once(operator, rows):
    x = torch.randn(10, 100)
    assert cpu.saved_bytes(operator, {"x": x}) == rows * x[0].nbytes
