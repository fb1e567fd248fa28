"""The README's figure, from the raw figures of `deltarule bench --cpu --output JSON`."""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.cpu import CASES, Shape
from deltarule.train.figures import DARK, DOTS_PER_INCH, INK, LIGHT, save

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
SIDES = {"deltarule": DARK, "transformers": LIGHT}
COLUMNS = {
    "median": (1.0, "seconds, forward and backward"),
    "saved_bytes_per_token_and_head": (2**10, "KiB kept for backward, each token and head"),
}


def main() -> None:
    """Draw time and kept memory of both cases, each pair of bars on an axis of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, default=FIGURES / "cpu_benchmark.json")
    parser.add_argument("--output", type=Path, default=FIGURES / "cpu_benchmark.png")
    paths = parser.parse_args()
    report = json.loads(paths.input.read_text())

    figure = Figure(figsize=(8.0, 3.0), dpi=DOTS_PER_INCH, layout="constrained")
    grid = figure.subplots(len(report["comparisons"]), len(COLUMNS), squeeze=False)
    for row, comparison in zip(grid, report["comparisons"], strict=True):
        row[0].set_title(CASES[comparison["name"]].title, loc="left", fontsize=10, color=INK)
        for axes, (column, (unit, _)) in zip(row, COLUMNS.items(), strict=True):
            bars(axes, [comparison[side][column] / unit for side in SIDES])
    for axes, (_, label) in zip(grid[-1], COLUMNS.values(), strict=True):
        axes.set_xlabel(label, color=INK, fontsize=9)
    figure.suptitle(subject(report), x=0.01, ha="left", fontsize=9, color=INK)
    save(figure, paths.output)


def bars(axes: Axes, values: list[float]) -> None:
    """A bar for each side, ours on top, with the value at its end."""
    drawn = axes.barh(list(SIDES), values, 0.7, color=list(SIDES.values()))
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


def subject(report: dict[str, Any]) -> str:
    """What was measured, in one line."""
    shape = Shape(**report["timed_shape"])
    return (
        f"[{shape.batch}, {shape.tokens}, {shape.heads} heads, K = V = {shape.channels}], float32, "
        f"CPU threads: {report['threads']}, torch {report['versions']['torch'].partition('+')[0]}, "
        f"transformers {report['versions']['transformers']}"
    )


if __name__ == "__main__":
    main()
