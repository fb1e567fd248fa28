"""Timed passes as a picture: milliseconds of each package, one panel for each operator."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cases import LONG, NARROW, OPERATIONS, TRAIN, WIDE
from bench.results import PASSES
from deltarule.train.extra import require
from deltarule.train.figures import DARK, DOTS_PER_INCH, INK, LIGHT, MIDDLE, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.report import Timing

LABELS = {"fla": "FLA", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer"}
COLOURS = {"deltarule": DARK, "fla": LIGHT, "flash_qla": MIDDLE, "flashinfer": "#e3b291"}
# The shapes that fill a GPU and that several packages ran; the table has the others.
SHOWN = (TRAIN, LONG, NARROW, WIDE)
# Inches.
WIDTH, BAR, GAP, MARGIN = 8.0, 0.2, 0.22, 1.2


def draw_figure(timings: "Sequence[Timing]", path: Path) -> None:
    """Draw the passes at the shapes of training that a peer ran too, a bar for each package."""
    shown = [one for one in timings if one.shape.name in SHOWN and one.peers]
    panels = {name: [one for one in shown if one.passed == name] for name in PASSES}
    bars = max(sum(len(one.peers) + 1 for one in panel) for panel in panels.values())
    groups = max(map(len, panels.values()))
    figure = require("matplotlib.figure").Figure(
        figsize=(WIDTH, MARGIN + BAR * bars + GAP * groups), dpi=DOTS_PER_INCH, layout="constrained"
    )
    for axes, (name, panel) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        draw_panel(axes, panel)
        axes.set_title(PASSES[name], loc="left", fontsize=10, color=INK)
    used = dict.fromkeys(peer for one in shown for peer in one.peers)
    patches = require("matplotlib.patches")
    handles = [patches.Patch(color=DARK, label="deltarule")]
    handles += [patches.Patch(color=COLOURS[peer], label=LABELS[peer]) for peer in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(figure, path)


def draw_panel(axes: "Axes", panel: "Sequence[Timing]") -> None:
    """The bars of one pass from zero milliseconds, ours on top of each group."""
    y, ticks, labels, longest = 0.0, [], [], 0.0
    for one in panel:
        start = y
        times = {"deltarule": one.ours_ms} | {peer: ms for peer, (ms, _) in one.peers.items()}
        for peer, ms in times.items():
            bar = axes.barh(y, ms, BAR, color=COLOURS[peer])
            axes.bar_label(bar, [f"{ms:.3g}"], padding=2, fontsize=7, color=INK)
            longest = max(longest, ms)
            y += BAR
        # The least time that the hardware needs.
        axes.plot([one.floor_ms] * 2, [start - BAR / 2, y - BAR / 2], color=INK, linewidth=1)
        ticks.append((start + y - BAR) / 2)
        labels.append(f"{OPERATIONS[one.operation].title}\n{one.shape.label}")
        y += GAP
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.set_xlim(0, 1.15 * longest or 1.0)
    axes.set_ylim(y, -BAR)
    axes.set_xlabel("milliseconds; line: the hardware's floor", fontsize=8, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
