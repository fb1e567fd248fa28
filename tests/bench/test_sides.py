"""The loop over sides and passes: its floor, what it compares, and a side that fails."""

import pytest
import torch

from bench import sides, timing


def test_the_floor_is_that_of_the_bytes_and_operations_of_a_pass():
    case = sides.Case({"x": torch.zeros(10)}, {}, operations=600, more_bytes=(4, 8))
    o, byte, operation = torch.zeros(5), 1e-3, 1e-2
    rates = 1 / byte, 1 / operation
    forward = 40 + 20 + 4
    assert case.floor_ms(o, False, *rates) == pytest.approx(1e3 * (forward * byte + 2))
    both = forward + 2 * 40 + 20 + 8
    assert case.floor_ms(o, True, *rates) == pytest.approx(1e3 * (both * byte + 6))


def test_a_side_is_compared_with_the_first_and_one_that_fails_is_a_row(monkeypatch):
    def failing(x):
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(timing, "graph_ms", lambda runs, _: 1.0)
    inputs = {"scale": torch.tensor([1.0]), "x": torch.ones(3)}
    run = {
        "exact": lambda x: x["x"] * x["scale"] * 2, "near": lambda x: x["x"] * x["scale"] * 2.002,
        "other": lambda x: x["x"] * 2, "broken": failing,
    }  # fmt: skip
    rows = list(sides.figures(sides.Case(inputs, run), 1e12, 1e12))
    both = {side: row for side, passed, row in rows if passed != "forward"}
    assert [side for side, *_ in rows] == [side for side in run for _ in range(2)]
    assert both["exact"]["apart"] == 0
    assert both["near"]["apart"] == pytest.approx(1e-3, rel=1e-3)
    # It has no gradient by scale, and that by x is none to compare with it.
    assert both["other"] == {"error": "KeyError: 'grad scale'"}
    assert both["broken"] == {"error": "RuntimeError: no kernel"}
