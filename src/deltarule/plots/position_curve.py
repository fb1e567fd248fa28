"""Bits per byte by position in a document: what a model gains from what it remembers."""

from collections.abc import Sequence
from pathlib import Path

from deltarule.eval.bits_per_byte import PositionBin
from deltarule.plots.style import DARK, INK, draw_levels, new_drawing, save


def position_curve(
    bins: Sequence[PositionBin],
    path: Path,
    *,
    trained_length: int | None = None,
    levels: dict[str, float] | None = None,
    title: str = "Bits per byte by position",
) -> None:
    """Draw the bins of `bits_by_position` over a logarithmic axis.

    Args:
        bins: What `bits_by_position` returned.
        path: Where the PNG goes.
        trained_length: Marks where positions start that training never reached. None: no mark.
        levels: Horizontal lines to compare with, by name. None: none.
        title: The heading.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    drawing = new_drawing(title=title, x="position in the piece, tokens", y="bits per byte")
    middles = [(b.first * b.last) ** 0.5 for b in bins]
    drawing.axes.plot(middles, [b.bits_per_byte for b in bins], color=DARK, marker="o")
    drawing.axes.set_xscale("log", base=2)
    drawing.axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if trained_length is not None:
        drawing.axes.axvline(trained_length, color=INK, linewidth=1.0, linestyle=":")
        drawing.axes.annotate(
            f"trained up to {trained_length:,}", (trained_length, 1.0),
            xycoords=("data", "axes fraction"), xytext=(-4, -4), textcoords="offset points",
            ha="right", va="top", rotation=90, color=INK, fontsize=9,
        )  # fmt: skip
    draw_levels(drawing.axes, levels or {})
    drawing.axes.margins(y=0.12)
    save(drawing.figure, path)
