"""Figures are written, whole, with what they were given."""

from itertools import pairwise

import pytest

from deltarule.train.evaluate import PositionBin
from deltarule.train.figures import (
    DARK,
    LIGHT,
    MIDDLE,
    column,
    loss_curve,
    new_drawing,
    position_curve,
    running_mean,
)

ROWS = [{"step": s, "bits_per_byte": 8 / s} for s in range(1, 60)]
ROWS += [{"step": 30, "validation": 1.0}, {"step": 59, "validation": None}]


def test_loss_curve_writes_a_png_and_nothing_else(tmp_path):
    loss_curve(
        ROWS,
        tmp_path / "loss.png",
        trained="bits_per_byte",
        evaluated="validation",
        label="bits per byte",
        levels={"gzip": 3.0, "xz": 2.9},
    )
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_nearly_nothing_do_not_fail(tmp_path):
    for rows in ([], ROWS[:1]):
        loss_curve(
            rows, tmp_path / "x.png", trained="bits_per_byte", evaluated="v", label="", levels={}
        )
    position_curve([PositionBin(1, 1, 5.0, 3)], tmp_path / "y.png")


def test_column_leaves_out_rows_without_a_number():
    assert column(ROWS, "validation") == [(30, 1.0)]


def test_running_mean_is_the_mean_of_the_values_around():
    values = [float(x * x % 7) for x in range(30)]
    means = running_mean(values, 5)
    assert means[20] == pytest.approx(sum(values[15:26]) / 11)
    assert means[1] == pytest.approx(sum(values[:7]) / 7)


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
