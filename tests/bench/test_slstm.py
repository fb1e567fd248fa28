"""The comparison of sLSTM with its authors' kernel, without a GPU."""

import torch

from bench import slstm as bench_slstm
from deltarule import slstm
from deltarule.ops.slstm import api, registered
from deltarule.ops.slstm.triton import split


def test_weights_lie_as_the_authors_have_them():
    gates, recurrent = torch.randn(1, 3, 4, 2, 5), torch.randn(2, 5, 4, 5)
    o, before = bench_slstm.ours(gates, recurrent), torch.zeros(1, 1, 4, 2, 5)
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
        return registered.plain

    monkeypatch.setattr(registered, "backend_of", found)
    monkeypatch.setattr(split, "IN_TURNS", True)
    monkeypatch.setitem(bench_slstm.HEADS, 16, 1)
    runs = api.IMPLEMENTATIONS["triton"]._replace(why_not=lambda inputs: None)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "triton", runs)
    monkeypatch.setattr(bench_slstm, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_slstm, "REPEATS", 1)
    sides = dict(bench_slstm.figures(16, (1, 3)))
    assert list(sides) == ["deltarule, a program a head", "deltarule", "PyTorch"]
    assert all(row["both_ms"] > 0 for row in sides.values())
    # The first call is the definition's, in float64, by what "auto" takes.
    in_turn = list(dict.fromkeys(ran[1:]))
    assert in_turn == [("triton", False), ("triton", True), ("torch", True)]
