"""Figures are written, whole, with what they were given."""

from itertools import pairwise

import pytest

from deltarule.train import figures
from deltarule.train.evaluate import PositionBin
from deltarule.train.figures import DARK, LIGHT, MIDDLE, loss_curve, new_drawing, position_curve

ROWS = [{"step": s, "bits_per_byte": 8 / s} for s in range(1, 60)]
MEASURED = "validation_bits_per_byte"
ROWS += [{"step": 30, MEASURED: 1.0}, {"step": 59, MEASURED: None}]


def draw(rows, path):
    loss_curve(rows, path, "bits_per_byte", {"gzip": 3.0, "xz": 2.9})


def test_curves_of_nearly_nothing_do_not_fail(tmp_path):
    for rows in ([], ROWS[:1]):
        draw(rows, tmp_path / "x.png")
    position_curve([PositionBin(1, 1, 5.0, 3)], tmp_path / "y.png")


def test_curves_are_of_rows_with_a_number_and_the_smooth_one_of_the_values_around(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure.axes[0]))
    values = [90.0, *(float(x * x % 7) for x in range(499))]
    rows = [{"step": s, "bits_per_byte": value} for s, value in enumerate(values)]
    draw([*rows, *ROWS[-2:]], None)
    each, smooth, measured, *_ = drawn[0].lines
    assert each.get_ydata().tolist() == values
    assert drawn[0].get_ylim() == pytest.approx((0 - 0.32, 4 + 0.32), abs=0.01)
    assert smooth.get_ydata()[20] == pytest.approx(sum(values[15:26]) / 11)
    assert smooth.get_ydata()[1] == pytest.approx(sum(values[:7]) / 7)
    assert measured.get_xydata().tolist() == [[30, 1.0]]


def test_inks_differ_in_grey():
    def lightness(ink):
        red, green, blue = (int(ink[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    greys = sorted(map(lightness, (DARK, MIDDLE, LIGHT)))
    assert min(b - a for a, b in pairwise(greys)) > 35


def test_a_drawing_leaves_pyplot_alone():
    new_drawing(title="t", x="x", y="y")
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []
