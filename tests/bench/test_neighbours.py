"""The table of what lies beside the recurrence, with tiny tensors and without a clock."""

import pytest
import torch

from bench import neighbours, sides, timing
from kernels.interpreted import interpreted
from promised import promised

promised("triton")

pytestmark = interpreted


def random(*shape: int, **_: object) -> torch.Tensor:
    """In float32, as the interpreter's bfloat16 is wrong, and of 256 sequences only 16."""
    return torch.randn(min(shape[0], 16), *shape[1:])


@pytest.mark.parametrize("name", neighbours.CASES)
def test_every_side_runs_forward_and_backward(name, monkeypatch):
    small = {"BATCH": 2, "TOKENS": 5, "CHANNELS": 8, "HEADS": 2, "VOCABULARY": 7}
    for constant, value in (small | {"DEVICE": "cpu"}).items():
        monkeypatch.setattr(neighbours, constant, value)
    monkeypatch.setattr(neighbours, "random", random)
    monkeypatch.setattr(timing, "graph_ms", lambda runs, _: float(runs[0]() is not None))
    rows = list(sides.figures(neighbours.CASES[name](), 1e12, 1e14))
    ours = [figures for side, _, figures in rows if side in ("deltarule", "PyTorch")]
    assert len(ours) == 4
    assert [row["ms"] for row in ours] == [1.0] * 4
    assert all(row["floor_ms"] > 0 for row in ours)
    assert all(row.get("apart", 0) < 1e-5 for row in ours)
