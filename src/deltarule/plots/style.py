"""The one style of all figures: few inks, told apart by tone and line, so grey is enough."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deltarule.train.extra import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1a1a1a"
# Each has its own lightness, and goes with its own line below.
DARK, MIDDLE, LIGHT = "#14375e", "#c2571a", "#8fa9c2"
DASHES = ("--", ":", "-.")
WIDTH, HEIGHT, DOTS_PER_INCH = 7.0, 4.2, 150


class Drawing(NamedTuple):
    """An empty figure with one pair of axes."""

    figure: "Figure"
    axes: "Axes"


def new_drawing(*, title: str, x: str, y: str) -> Drawing:
    """A figure in the style, its axes named.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    # A bare Figure leaves the global state of pyplot and the user's windows alone.
    figure = require("matplotlib.figure").Figure(
        figsize=(WIDTH, HEIGHT), dpi=DOTS_PER_INCH, layout="constrained"
    )
    axes = figure.add_subplot()
    dress(axes, title=title, x=x, y=y)
    return Drawing(figure, axes)


def dress(axes: "Axes", *, title: str, x: str, y: str) -> None:
    """Give a pair of axes its names and the style."""
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def new_grid(rows: int, columns: int, *, title: str) -> "tuple[Figure, list[list[Axes]]]":
    """A figure of several axes in the style, a list of them for each row.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = require("matplotlib.figure").Figure(
        figsize=(1.5 * WIDTH, 0.5 * HEIGHT * rows + 0.8), dpi=DOTS_PER_INCH, layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(INK)
        one.tick_params(colors=INK, labelsize=8)
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
    """Write the figure whole or not at all."""
    aside = path.with_name(f".{path.name}")
    figure.savefig(aside, format="png")
    aside.replace(path)
