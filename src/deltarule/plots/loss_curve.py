"""The course of a run: a figure of every step, its running mean, and the evaluations."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from deltarule.plots.style import DARK, LIGHT, MIDDLE, draw_levels, new_drawing, save


def loss_curve(
    rows: Sequence[dict[str, Any]],
    path: Path,
    *,
    trained: str,
    evaluated: str,
    label: str,
    levels: dict[str, float],
    title: str = "Training",
) -> None:
    """Draw a column of metrics.jsonl over the steps.

    Args:
        rows: Rows of metrics.jsonl.
        path: Where the PNG goes.
        trained: The column that every step has.
        evaluated: The column that evaluations have.
        label: Name of the vertical axis.
        levels: Horizontal lines to compare with, by name.
        title: The heading.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    drawing = new_drawing(title=title, x="step", y=label)
    points = column(rows, trained)
    steps, values = [s for s, _ in points], [v for _, v in points]
    drawing.axes.plot(steps, values, color=LIGHT, linewidth=0.7, label="training, each step")
    smooth = running_mean(values, max(1, len(values) // 100))
    drawing.axes.plot(steps, smooth, color=DARK, linewidth=1.8, label="training, running mean")
    if measured := column(rows, evaluated):
        drawing.axes.plot(
            *zip(*measured, strict=True), color=MIDDLE, linewidth=1.2, marker="o", markersize=4,
            linestyle="--", label="validation",
        )  # fmt: skip
    draw_levels(drawing.axes, levels)
    drawing.axes.locator_params(axis="x", integer=True)
    drawing.axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    drawing.axes.set_ylim(*limits(values, [*levels.values(), *(v for _, v in measured)]))
    drawing.axes.legend(frameon=False, fontsize=9)
    save(drawing.figure, path)


def limits(values: list[float], others: list[float]) -> tuple[float, float]:
    """The vertical range: without the first steps, which are far off and would flatten all else.

    Example:
        >>> low, high = limits([9.0] + [2.0] * 99, [3.0])
        >>> 1.9 < low < 2.0, 3.0 < high < 3.2
        (True, True)
    """
    settled = [*values[len(values) // 20 :], *others] or [0.0]
    margin = 0.08 * (max(settled) - min(settled)) + 1e-3
    return min(settled) - margin, max(settled) + margin


def column(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Step and value of every row that has a number in this column."""
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the values within `window` steps before and after each place.

    Example:
        >>> running_mean([1.0, 2.0, 6.0, 7.0], 1)
        [1.5, 3.0, 5.0, 6.5]
    """
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - window), min(len(values), i + window + 1)) for i in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]
