import pytest
import torch
import torch.nn.functional as F

from bench.timing import outputs
from deltarule.ops.delta_rule import definition
from experiments import speedup
from experiments.speedup import SpeedupCell
from tolerance import assert_close

CPU = torch.device("cpu")
# Without a GPU the kernels run in Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SpeedupCell(name="small", head=16, width=32, tokens=64, lengths=(16, 64), repeats=2)


def test_the_loop_in_kernels_is_the_definition():
    q, k = F.normalize(torch.randn(2, 2, 9, 3, 16, device=DEVICE), dim=-1).unbind()
    v, grad = torch.randn(2, 2, 9, 3, 24, device=DEVICE).unbind()
    inputs = {"q": q, "k": k, "v": v, "beta": torch.rand(2, 9, 3, device=DEVICE)}
    wide = {name: x.double() for name, x in inputs.items()}
    exact = outputs(lambda x: definition.delta_rule(**x).o, wide, grad)
    for name, x in outputs(speedup.by_kernels, inputs, grad).items():
        assert_close(x, exact[name], gradient=name != "o", name=name)


def test_both_forms_are_checked_against_each_other_and_timed(tmp_path):
    threads = torch.get_num_threads()
    figures = SMALL.run(tmp_path / "cell", CPU)
    assert figures["lengths"].keys() == {"16", "64"}
    for row in figures["lengths"].values():
        assert 0 < row["difference"] < 1e-5
        assert all(
            row[f"{form}_{kind}"] > 0 for form in ("chunks", "loop") for kind in ("forward", "both")
        )
    assert torch.get_num_threads() == threads


def test_a_wrong_baseline_is_no_result(monkeypatch, tmp_path):
    monkeypatch.setattr(speedup, "by_definition", lambda x: 1.1 * speedup.by_library(x))
    with pytest.raises(ValueError, match="must compute the same"):
        SMALL.run(tmp_path / "cell", CPU)
