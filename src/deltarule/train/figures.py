"""The one style of all figures: few inks, told apart by tone and line, so grey is enough."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltarule.atomic_file import write_atomically
from deltarule.train.evaluate import PositionBin
from deltarule.train.extra import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1a1a1a"
# Each has its own lightness, and goes with its own line below.
DARK, MIDDLE, LIGHT = "#14375e", "#c2571a", "#8fa9c2"
DASHES = ("--", ":", "-.")
WIDTH, HEIGHT, DOTS_PER_INCH = 7.0, 4.2, 150


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches."""
    # A bare Figure leaves the global state of pyplot and the user's windows alone.
    kind: type[Figure] = require("matplotlib.figure").Figure
    return kind(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def new_drawing(*, title: str, x: str, y: str) -> "tuple[Figure, Axes]":
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    dress(axes, title=title, x=x, y=y)
    return figure, axes


def dress(axes: "Axes", *, title: str, x: str, y: str) -> None:
    # Without what no font has, such as the bytes of a file's name that are no text.
    axes.set_title(title.encode(errors="replace").decode(), loc="left", color=INK, fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    bare(axes)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def bare(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK)


def new_grid(rows: int, columns: int, *, title: str) -> "tuple[Figure, list[list[Axes]]]":
    """A figure of several axes in the style, a list of them for each row."""
    figure = new_figure(1.5 * WIDTH, 0.5 * HEIGHT * rows + 0.8)
    title = title.encode(errors="replace").decode()
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        bare(one)
        one.tick_params(labelsize=8)
    return figure, [list(row) for row in axes]


def draw_levels(axes: "Axes", levels: dict[str, float]) -> None:
    """Horizontal lines with name and value written on them, the lowest name below its line.

    That keeps two neighbours, as compressors are, from being printed over each other.
    """
    for index, (name, value) in enumerate(sorted(levels.items(), key=lambda item: item[1])):
        axes.axhline(value, color=INK, linewidth=1.0, linestyle=DASHES[index % len(DASHES)])
        axes.annotate(
            f"{name} {value:.3g}", (1.0, value), xycoords=("axes fraction", "data"),
            xytext=(0, 3 if index else -3), textcoords="offset points", ha="right",
            va="bottom" if index else "top", color=INK, fontsize=9,
        )  # fmt: skip


def save(figure: "Figure", path: Path) -> None:
    write_atomically(path, lambda aside: figure.savefig(aside, format="png"))


def loss_curve(
    rows: Sequence[dict[str, Any]],
    path: Path,
    measure: str,
    levels: dict[str, float],
    title: str = "Training",
) -> None:
    """Draw a measure in metrics.jsonl over the steps, with what validation had of it."""
    figure, axes = new_drawing(title=title, x="step", y=measure.replace("_", " "))
    points = column(rows, measure)
    steps, values = [s for s, _ in points], [v for _, v in points]
    axes.plot(steps, values, color=LIGHT, linewidth=0.7, label="training, each step")
    # The mean of the values within so many steps before and after each.
    sums, window = [0.0, *accumulate(values)], max(1, len(values) // 100)
    ends = [(max(0, i - window), min(len(values), i + window + 1)) for i in range(len(values))]
    smooth = [(sums[last] - sums[first]) / (last - first) for first, last in ends]
    axes.plot(steps, smooth, color=DARK, linewidth=1.8, label="training, running mean")
    if measured := column(rows, f"validation_{measure}"):
        axes.plot(
            *zip(*measured, strict=True), color=MIDDLE, linewidth=1.2, marker="o", markersize=4,
            linestyle="--", label="validation",
        )  # fmt: skip
    draw_levels(axes, levels)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    # Without the first steps, which are far off and would flatten all else.
    settled = values[len(values) // 20 :]
    settled = [*settled, *levels.values(), *(v for _, v in measured)] or [0.0]
    margin = 0.08 * (max(settled) - min(settled)) + 1e-3
    axes.set_ylim(min(settled) - margin, max(settled) + margin)
    # Where matplotlib looks for the best place itself, it warns of many steps on a slow machine.
    rises = smooth[-1:] > smooth[:1]
    axes.legend(frameon=False, fontsize=9, loc="upper left" if rises else "upper right")
    save(figure, path)


def column(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]


def position_curve(
    bins: Sequence[PositionBin],
    path: Path,
    *,
    trained_length: int | None = None,
    levels: dict[str, float] | None = None,
) -> None:
    """Draw bins of positions over a logarithmic axis, and mark the length that was trained on."""
    x, y = "position in the piece, tokens", "bits per byte"
    figure, axes = new_drawing(title="Bits per byte by position", x=x, y=y)
    middles = [(b.first * b.last) ** 0.5 for b in bins]
    axes.plot(middles, [b.bits_per_byte for b in bins], color=DARK, marker="o")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if trained_length is not None:
        axes.axvline(trained_length, color=INK, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"trained up to {trained_length:,}", (trained_length, 1.0),
            xycoords=("data", "axes fraction"), xytext=(-4, -4), textcoords="offset points",
            ha="right", va="top", rotation=90, color=INK, fontsize=9,
        )  # fmt: skip
    draw_levels(axes, levels or {})
    axes.margins(y=0.12)
    save(figure, path)
