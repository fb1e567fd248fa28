"""The figure of docs/several_gpus.md: the fastest divisions that `deltarule plan` finds.

python tools/plan_figure.py        writes docs/figures/plan.json, and plan.png of it
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deltarule.parallel.estimate import best
from deltarule.parallel.machine import MACHINES, size_of
from deltarule.train.figures import DARK, DOTS_PER_INCH, INK, LIGHT, MIDDLE, dress, save

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
# Tokens of an optimizer step.
BATCH = 2**24
GPUS = [2**i for i in range(3, 13)]
LENGTHS = [2**i for i in range(13, 25)]
MODELS = {"1.3 B": 1.3e9, "7 B": 7e9, "70 B": 70e9}
LAYERS = {"recurrent layers": 0, "every fourth softmax": 4}
INKS = DARK, MIDDLE, LIGHT


def points() -> dict[str, Any]:
    """Tokens/s of the fastest division, and the division; None where nothing fits."""
    by_gpus = {
        name: [fastest(parameters, 0, gpus, 8192) for gpus in GPUS]
        for name, parameters in MODELS.items()
    }
    by_length = {
        name: [fastest(7e9, every, 512, length) for length in LENGTHS]
        for name, every in LAYERS.items()
    }
    alone = [fastest(7e9, 0, 512, length, most_context=1) for length in LENGTHS]
    by_length["recurrent layers, no context"] = alone
    return {"gpus": GPUS, "by_gpus": by_gpus, "lengths": LENGTHS, "by_length": by_length}


def fastest(
    parameters: float, every: int, gpus: int, length: int, most_context: int = 2**30
) -> dict[str, Any] | None:
    """Of all divisions on H200s with contexts of at most so many."""
    found = best(size_of(parameters, every=every), MACHINES["h200"], gpus, length, BATCH)
    first = next((step for step in found if step.division.context <= most_context), None)
    if first is None:
        return None
    return {
        "tokens_per_second": round(first.tokens_per_second),
        "division": str(first.division),
        "binds": first.binds,
    }


def main() -> None:
    """Write both."""
    text = json.dumps(points(), indent=1) + "\n"
    (FIGURES / "plan.json").write_text(text)
    draw(json.loads(text), FIGURES / "plan.png")
    named = hashlib.sha256((FIGURES / "plan.png").read_bytes()).hexdigest()
    print(f"plan.png {named[:16]}")


def draw(found: dict[str, Any], path: Path) -> None:
    """Tokens a second over the GPUs, and over the length of a row."""
    figure = Figure(figsize=(10.0, 4.2), dpi=DOTS_PER_INCH, layout="constrained")
    left, right = figure.subplots(1, 2)
    dress(left, title="Rows of 8 K tokens", x="H200s", y="tokens/s")
    lines(left, found["gpus"], found["by_gpus"])
    dress(right, title="7 B on 512 H200s", x="tokens of a row", y="tokens/s")
    lines(right, found["lengths"], found["by_length"])
    save(figure, path)


def lines(axes: Axes, x: list[int], found: dict[str, list[dict[str, Any] | None]]) -> None:
    """A line for each name, with gaps where nothing fits."""
    for ink, (name, steps) in zip(INKS, found.items(), strict=True):
        fits = [(a, step["tokens_per_second"]) for a, step in zip(x, steps, strict=True) if step]
        axes.plot(*zip(*fits, strict=True), "o-", color=ink, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x[::2], [short(a) for a in x[::2]])
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def short(count: int) -> str:
    """A power of 2 as people say it.

    Examples:
        >>> short(512), short(8192), short(2**24)
        ('512', '8 K', '16 M')
    """
    for unit, name in ((2**20, " M"), (2**10, " K")):
        if count >= 8 * unit or (count >= unit and unit == 2**20):
            return f"{count // unit}{name}"
    return str(count)


if __name__ == "__main__":
    main()
