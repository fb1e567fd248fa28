"""The benchmark of the layers over `selective_scan`, on a CPU."""

import pytest

from bench import scans, sides


@pytest.mark.parametrize("name", scans.LAYERS)
def test_every_layer_gives_the_operator_its_inputs(name: str, monkeypatch) -> None:
    monkeypatch.setattr(sides, "REPEATS", 1)
    rows = list(sides.figures(scans.scan_case(name, "cpu", (1, 20, 64)), 1e12, 1e14))
    assert all("CUDA" in row["error"] for side, _, row in rows if side == "deltarule")
    assert all(row["ms"] > 0 for side, _, row in rows if side == "PyTorch")
