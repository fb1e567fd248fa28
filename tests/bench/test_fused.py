"""The comparisons of fused kernels, and of sLSTM with its authors' kernel, without a GPU."""

import itertools

import pytest
import torch

from bench import decode, fused, scans, sides, timing
from promised import promised

promised("triton")

from deltarule import slstm
from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.slstm import api
from deltarule.ops.slstm.triton import split


def test_a_variant_is_turned_on_and_off_again():
    fills, timed = stage.fills, stage.STEPS_TIMED
    with fused.variant("fused"):
        assert stage.fills(None, 132)
        assert (stage.TRAINING, stage.STEPS_TIMED) == (True, 2)
    with fused.variant("triton"):
        assert not stage.fills(None, 132)
        assert not stage.TRAINING
    assert stage.fills == fills
    assert stage.TRAINING
    assert timed == stage.STEPS_TIMED


@pytest.mark.parametrize("name", fused.CALLS)
def test_every_call_runs(name, monkeypatch):
    monkeypatch.setattr(sides, "REPEATS", 1)
    call = fused.CALLS[name]
    lengths = (3, 4) if call.lengths else ()
    small = call._replace(batch=1, tokens=7, heads=1, value_heads=2, size=8, lengths=lengths)
    rows = list(sides.figures(fused.case_of(small, "cpu"), 1e12, 1e14))
    assert [side for side, *_ in rows] == ["triton", "triton", "fused", "fused", "chosen", "chosen"]
    assert all(row.get("apart", 0) == 0 for *_, row in rows)


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


def test_each_side_is_what_it_says(monkeypatch):
    """Where Triton runs: the kernels of a program a head, then those of split heads, then none."""
    ran = []

    def found(backend, inputs):
        ran.append((backend, split.takes(inputs)))
        return api.plain

    monkeypatch.setattr(api, "backend_of", found)
    monkeypatch.setattr(split, "IN_TURNS", True)
    monkeypatch.setitem(scans.SLSTM_HEADS, 16, 1)
    runs = api.IMPLEMENTATIONS["triton"]._replace(why_not=lambda inputs: None)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "triton", runs)
    monkeypatch.setattr(scans, "find_spec", lambda name: None)
    monkeypatch.setattr(sides, "REPEATS", 1)
    case = scans.slstm_case(16, (1, 3))
    assert list(case.sides) == ["float64", "deltarule, a program a head", "deltarule", "PyTorch"]
    rows = list(sides.figures(case, 1e12, 1e14))
    assert all(row["ms"] > 0 and row.get("apart", 0) < 0.02 for *_, row in rows)
    # The first calls are in float64, by what "auto" takes.
    in_turn = [one for one, _ in itertools.groupby(ran)]
    assert in_turn[-3:] == [("triton", False), ("triton", True), ("torch", True)]
