"""The comparisons of steps, and of sLSTM with its authors' kernel, without a GPU."""

import pytest
import torch

from bench import decode, scans, sides, timing
from promised import promised

promised("triton")

from deltarule import slstm


def test_a_decoding_step_is_timed_by_where_its_gates_are_made(monkeypatch):
    monkeypatch.setattr(decode, "ROTATED_BYTES", 3 * 4 * 32 * 128 * 128)
    monkeypatch.setattr(timing, "graph_ms", lambda runs, _: float(len([run() for run in runs])))
    rows = list(sides.figures(decode.step(1, torch.float32, "cpu"), 1e12, 1e14))
    # A graph has a call for each state: none is left in the cache.
    assert all(row["ms"] == 3 for *_, row in rows)
    assert [(side, passed) for side, passed, _ in rows] == [
        (side, "forward") for side in ("made before", "of logits in the step", "by kernels")
    ]
    states = 2 * 4 * 32 * 128 * 128 / 1e12 * 1e3
    assert all(row["floor_ms"] == pytest.approx(states, rel=0.02) for *_, row in rows)


def test_weights_lie_as_the_authors_have_them():
    gates, recurrent = torch.randn(1, 3, 4, 2, 5), torch.randn(2, 5, 4, 5)
    o, before = scans.ours(recurrent, {"gates": gates}), torch.zeros(1, 1, 4, 2, 5)
    first = slstm(gates[:, :1].transpose(2, 3), torch.zeros(2, 4, 5, 5)).o
    # From the output of a head to each of its gates.
    before[:, 0] = torch.einsum("bhc,hcgd->bghd", first[:, 0], recurrent)
    expected = slstm(
        torch.cat([gates[:, :1], gates[:, 1:2] + before], 1).transpose(2, 3),
        torch.zeros(2, 4, 5, 5),
    ).o
    torch.testing.assert_close(o[:, 1], expected[:, 1])


def test_slstm_is_that_of_float64_on_every_side(monkeypatch):
    monkeypatch.setitem(scans.SLSTM_HEADS, 16, 1)
    monkeypatch.setattr(scans, "find_spec", lambda name: None)
    monkeypatch.setattr(sides, "REPEATS", 1)
    rows = list(sides.figures(scans.slstm_case(16, (1, 3)), 1e12, 1e14))
    assert [*dict.fromkeys(side for side, *_ in rows)] == ["float64", "deltarule", "PyTorch"]
    assert all(row["ms"] > 0 and row.get("apart", 0) < 0.02 for *_, row in rows)
