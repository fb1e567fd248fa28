"""The benchmark of the layers over `selective_scan`, and of sLSTM, on a CPU."""

import pytest
import torch

from bench import scans, sides
from deltarule import slstm
from promised import promised

promised("triton")


@pytest.mark.parametrize("name", scans.LAYERS)
def test_every_layer_gives_the_operator_its_inputs(name: str, monkeypatch) -> None:
    monkeypatch.setattr(sides, "REPEATS", 1)
    rows = list(sides.figures(scans.scan_case(name, "cpu", (1, 20, 64)), 1e12, 1e14))
    assert all("CUDA" in row["error"] for side, _, row in rows if side == "deltarule")
    assert all(row["ms"] > 0 for side, _, row in rows if side == "PyTorch")


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
