"""A report as a picture: how far above the floor each peer is, forward and with the backward."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cases import OPERATIONS, Shape
from bench.results import PASSES, groups
from deltarule.train.extra import require
from deltarule.train.figures import DARK, DOTS_PER_INCH, INK, LIGHT, MIDDLE, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

COLOURS = {
    "deltarule": DARK, "fla": LIGHT, "fla-triton": "#c9d6e2", "flash_qla": MIDDLE,
    "flashinfer": "#e3b291", "torch": "#9a9a9a",
}  # fmt: skip
# Inches: of the whole, of a bar, of a group's distance from the next, of head and foot.
WIDTH, BAR, GAP, MARGIN = 9.0, 0.17, 0.14, 1.3
# The left end of the axis, where bars begin, and the right one of an empty panel.
NEAREST, FARTHEST = 0.7, 10.0


def draw_figure(report: Row, path: Path) -> None:
    """Draw a bar for every peer, operation and shape, with its milliseconds at the end.

    Args:
        report: What `deltarule bench` wrote.
        path: Where the PNG goes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    grouped = {key: rows for key, rows in groups(report["rows"]).items() if any(map(drawn, rows))}
    bars = sum(len(rows) for rows in grouped.values())
    height = MARGIN + BAR * bars + GAP * len(grouped)
    figure = require("matplotlib.figure").Figure(
        figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained"
    )
    panels = figure.subplots(1, len(PASSES), sharey=True)
    for axes, (name, title) in zip(panels, PASSES.items(), strict=True):
        draw_panel(axes, grouped, name)
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        axes.set_xlabel("times above the floor; ms at the bar", fontsize=9, color=INK)
    used = dict.fromkeys(row["peer"] for rows in grouped.values() for row in rows)
    handles = [
        require("matplotlib.patches").Patch(color=COLOURS[peer], label=peer) for peer in used
    ]
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9
        )
    figure.suptitle(subject(report), x=0.01, ha="left", fontsize=9, color=INK)
    save(figure, path)


def drawn(row: Row) -> bool:
    """Whether any pass of a row has a time."""
    return any("times_floor" in row.get(name, {}) for name in PASSES)


def draw_panel(axes: "Axes", grouped: dict[tuple[str, str], list[Row]], name: str) -> None:
    """The bars of one pass, ours on top of each group."""
    y, ticks, labels, lengths = 0.0, [], [], []
    for (operation, _), rows in grouped.items():
        start = y
        for row in rows:
            figures = row.get(name, {})
            if "times_floor" in figures:
                lengths.append(figures["times_floor"])
                bar = axes.barh(y, lengths[-1], BAR, color=COLOURS[row["peer"]])
                text = f"{figures['graph_ms']:.3g}"
                axes.bar_label(bar, [text], padding=2, fontsize=7, color=INK)
            y += BAR
        ticks.append((start + y - BAR) / 2)
        labels.append(f"{OPERATIONS[operation].title}\n{Shape(*rows[0]['shape']).label}")
        y += GAP
    axes.axvline(1.0, color=INK, linewidth=1.0, linestyle=":")
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.set_xscale("log")
    # Room for the numbers at the bars.
    axes.set_xlim(NEAREST, 2 * max(lengths, default=FARTHEST))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(y, -BAR)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)


def subject(report: Row) -> str:
    """Where and with what the figures were taken."""
    versions = report["versions"]
    told = ", ".join(f"{name} {number.partition('+')[0]}" for name, number in versions.items())
    return f"{report['device']}, bfloat16, CUDA graphs, {report['date'][:10]}\n{told}"
