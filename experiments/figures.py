"""Curves of several systems side by side: ours with filled marks, published ones with hollow."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from deltarule.models import PATTERNS
from deltarule.nn import SYSTEMS
from deltarule.train.extra import require
from deltarule.train.figures import DARK, INK, LIGHT, MIDDLE, draw_levels, dress, new_figure
from experiments.experiment import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of matplotlib, which only drawing imports.
Figure = Any


class Look(NamedTuple):
    """How a curve looks: in grey, tone, mark and line still tell it from the others."""

    ink: str
    mark: str
    line: str


# A system looks the same in every figure: tone by family, mark by member.
SYSTEM_LOOKS = {
    "deltanet": Look(DARK, "o", "-"), "delta_product": Look(DARK, "D", "--"),
    "gated_deltanet": Look(MIDDLE, "s", "-"), "kda": Look(MIDDLE, "P", "--"),
    "gated_delta_product": Look(MIDDLE, "p", ":"), "mamba2": Look(LIGHT, "^", "-"),
    "gla": Look(LIGHT, "v", "--"), "retnet": Look(LIGHT, "<", ":"),
    "linear_attention": Look(LIGHT, "X", "-."), "mamba1": Look(LIGHT, ">", "-"),
    "attention": Look(INK, "*", "-"), "mesa": Look(INK, "d", "-."),
    "gated_deltanet_h1": Look(INK, "h", "--"), "gated_deltanet_h2": Look(INK, "H", ":"),
}  # fmt: skip
# Of a second form of a system, which keeps its tone and mark.
VARIANT_LINE = ":"
# For settings that are no system, in the order in which labels appear: tones are for families.
LOOKS = tuple(
    Look(INK, mark, line) for mark, line in zip("os^DvPX*", ("-", "--", ":", "-.") * 2, strict=True)
)
# A number of writes has one mark in every figure, too.
WRITES_LOOKS = {f"n = {n}": Look(INK, mark, "-") for n, mark in enumerate("os^D", 1)}
# What is shorter on a figure than in the table of systems.
SHORT = {"gla": "GLA", "kda": "KDA", "attention": "Softmax attention"}

# Behind the name of a system that lacks its convolution.
BARE = "-no-conv"

# Inches.
WIDTH, HEIGHT, LEGEND_LINE = 4.4, 3.3, 0.24
# So many different places on the horizontal axis are all named.
MOST_TICKS = 9
# So many numbers as long as 16,000 stand side by side.
MOST_NUMBERS = 6
# About so many points of a curve are marked.
MOST_MARKS = 16


@dataclass(frozen=True)
class Curve:
    """Points of one system, or of one setting of it."""

    label: str
    """A key of `deltarule.nn.SYSTEMS` or `deltarule.models.PATTERNS`, maybe with `BARE` behind it,
    shown by its title and drawn in its own look; or any other text."""
    points: Mapping[Any, float]
    ranges: Sequence[tuple[float, float]] | None = None
    """Least and largest value that each point stands for, such as those of several seeds."""
    published: bool = False
    """Read from the paper: hollow marks and no line."""
    look: str | None = None
    """Draw it as this system, dotted if another label of the figure is that already; None goes by
    the label."""

    @classmethod
    def through(
        cls, label: str, points: Mapping[Any, Sequence[float]], *, look: str | None = None
    ) -> "Curve":
        """The mean of the values at each place, such as those of several seeds, and their range."""
        means = {place: statistics.fmean(values) for place, values in points.items()}
        return cls(label, means, [(min(x), max(x)) for x in points.values()], look=look)


def in_training(label: str, result: Result) -> Curve:
    """What a cell watched, step by step: the accuracy, or bits per byte of text."""
    return Curve(label, {step: seen for step, *_, seen in result.figures["curve"]})


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with the names of both."""

    curves: Sequence[Curve]
    x: str
    y: str
    title: str = ""
    ticks: Sequence[str] = ()
    """Where the horizontal axis is no number: names of its places 0, 1, 2 and so on. Points are
    not joined."""
    log_x: bool = False
    """To base 2."""
    log_y: bool = False
    """To base 10."""
    limits: tuple[float, float] | None = None
    """Of the vertical axis."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines by name, such as chance."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """Vertical lines by name, such as the length that was trained."""


def draw_curves(panels: Sequence[Panel], *, title: str, columns: int = 3) -> Figure:
    """A figure of panels, at most `columns` beside each other, with one legend below them all."""
    curves = [curve for panel in panels for curve in panel.curves]
    looks = looks_of(curves)
    across = min(columns, len(panels))
    down = -(-len(panels) // across)
    width = max(WIDTH * across, 1.5 * WIDTH)
    legend_columns = int(width // 1.9)
    legend_lines = -(-(len(looks) + 2) // legend_columns)
    figure: Figure = new_figure(width, HEIGHT * down + LEGEND_LINE * legend_lines + 0.4)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    for index, panel in enumerate(panels):
        draw_panel(figure.add_subplot(down, across, index + 1), panel, looks)
    figure.legend(
        handles=legend_entries(looks, published=any(curve.published for curve in curves)),
        loc="outside lower center", ncols=legend_columns, frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


def looks_of(curves: Sequence[Curve]) -> dict[str, Look]:
    """The look of each label: a system's own, or the next of those for settings."""
    looks, free = dict[str, Look](), itertools.cycle(LOOKS)
    for curve in curves:
        if curve.label in looks:
            continue
        system = (curve.look or curve.label).removesuffix(BARE)
        look = SYSTEM_LOOKS.get(system) or WRITES_LOOKS.get(system) or next(free)
        looks[curve.label] = look._replace(line=VARIANT_LINE) if look in looks.values() else look
    return looks


def title_of(label: str) -> str:
    """What a figure and a table call a system; any other text as it is."""
    if label.endswith(BARE):
        return f"{title_of(label.removesuffix(BARE))}, no convolution"
    known = SYSTEMS.get(label) or PATTERNS.get(label)
    return SHORT.get(label, label if known is None else known.title)


def draw_panel(axes: "Axes", panel: Panel, looks: dict[str, Look]) -> None:
    dress(axes, title=panel.title, x=panel.x, y=panel.y)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    if panel.log_y:
        axes.set_yscale("log")
    for curve in panel.curves:
        x, look, joined = [*curve.points], looks[curve.label], not panel.ticks
        axes.plot(
            x, [*curve.points.values()], color=look.ink, linewidth=1.6, marker=look.mark,
            linestyle=look.line if joined and not curve.published else "none",
            markersize=8 if curve.published else 6, markeredgecolor=look.ink,
            markerfacecolor="none" if curve.published else look.ink,
            markevery=max(1, len(x) // MOST_MARKS),
        )  # fmt: skip
        if not curve.ranges:
            continue
        low, high = zip(*curve.ranges, strict=True)
        if joined and len(x) > 1:
            axes.fill_between(x, low, high, color=look.ink, alpha=0.18, linewidth=0)
        else:
            axes.vlines(x, low, high, color=look.ink, linewidth=1.2)
    name_places(axes, panel)
    draw_levels(axes, dict(panel.levels))
    for name, place in panel.marks.items():
        axes.axvline(place, color=INK, linewidth=1.0, linestyle=":")
        axes.annotate(
            name, (place, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -3),
            textcoords="offset points", ha="right", va="top", rotation=90, color=INK, fontsize=8,
        )  # fmt: skip
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)


def name_places(axes: "Axes", panel: Panel) -> None:
    places = sorted({float(x) for curve in panel.curves for x in curve.points})
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
    elif panel.log_x and 1 <= len(places) <= MOST_TICKS:
        axes.set_xticks(places, [f"{place:,.10g}" for place in places])
        axes.minorticks_off()
    else:
        if not panel.log_x:
            axes.locator_params(axis="x", nbins=MOST_NUMBERS)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def legend_entries(looks: dict[str, Look], *, published: bool) -> list[Any]:
    """One entry a label, and what filled and hollow marks mean if both occur."""
    line = require("matplotlib.lines").Line2D
    entries = [
        line([], [], color=look.ink, linestyle=look.line, marker=look.mark, label=title_of(label))
        for label, look in looks.items()
    ]
    if published:
        hollow = {"color": INK, "linestyle": "none", "marker": "o"}
        entries += [
            line([], [], label="ours", **hollow),
            line([], [], label="published", markerfacecolor="none", **hollow),
        ]
    return entries
