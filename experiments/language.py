"""Small language models that differ in their mixer alone: equal tokens, equal parameters."""

import math
from pathlib import Path

from experiments.experiment import Experiment, Result, Scale
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.markdown import markdown_table
from experiments.seeds import Runs, by_setting, on_noise, places, setting
from experiments.text_cell import TextCell
from experiments.text_setting import Size, bits, text_cell, text_model, text_of

# The slowest first, each with what stands for it below the points of the figure.
COMPARED = {
    "kda": "KDA", "delta_product": "DP", "gla": "GLA", "gated_deltanet": "GDN",
    "gated_deltanet_h1": "H1", "deltanet": "DN", "mamba2": "M2", "retnet": "Ret",
    "attention": "T++", "linear_attention": "LA",
}  # fmt: skip
ON_A_LAPTOP = ("gated_deltanet", "attention", "linear_attention")
SEEDS: dict[Scale, tuple[int, ...]] = {"laptop": (0,), "gpu": (0, 1, 2)}

# Perplexity of a word on WikiText: DeltaNet's table 2 at 340 M parameters and 15 B tokens, and
# Gated DeltaNet's table of common sense at 1.3 B and 100 B.
SMALL = {"attention": 28.39, "retnet": 32.33, "gla": 28.65, "deltanet": 28.24}
LARGE = {
    "retnet": 19.08, "mamba2": 16.56, "deltanet": 17.71, "gated_deltanet": 16.42,
    "attention": 18.53, "gated_deltanet_h1": 16.07,
}  # fmt: skip


def cells(scale: Scale) -> list[TextCell]:
    """A model for each mixer and seed."""
    size: Size = "laptop" if scale == "laptop" else "large"
    chosen = ON_A_LAPTOP if scale == "laptop" else COMPARED
    return [
        text_cell(name, text_model(name, size), size, seed)
        for seed in SEEDS[scale]
        for name in chosen
    ]


def learning_curve(name: str, results: list[Result]) -> Curve:
    """Bits per byte over the tokens trained on, and the range over the seeds."""
    courses = [result.figures["curve"] for result in results]
    cell = results[0].cell
    each = cell["rows"] * cell["length"] / 1e6
    by_step = [[value for _, value in points] for points in zip(*courses, strict=False)]
    return Curve(
        name, [step * each for step, _ in courses[0]][: len(by_step)],
        [math.fsum(values) / len(values) for values in by_step],
        low=[min(values) for values in by_step], high=[max(values) for values in by_step],
    )  # fmt: skip


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """The course of training, the final loss of each seed, and the published perplexities."""
    runs = by_setting(results, bits)
    order = sorted(runs, key=lambda name: runs[name].mean)
    by_name: dict[str, list[Result]] = {name: [] for name in order}
    for result in results:
        if result.error is None:
            by_name[setting(result)].append(result)
    ticks = [COMPARED[name] for name in order]
    panels = [
        Panel([learning_curve(name, by_name[name]) for name in order],
              x="million bytes trained on", y="bits per byte, held out"),
        Panel([final(name, place, runs[name]) for place, name in enumerate(order)],
              x="system", y="bits per byte, held out", title="at the end, range of the seeds",
              ticks=ticks),
        Panel(published(LARGE, order), x="system", y="perplexity of a word, WikiText",
              title="published, 1.3 B", ticks=ticks),
    ]  # fmt: skip
    draw_curves(panels, path, title="Small language models at equal tokens and parameters")


def final(name: str, place: int, runs: Runs) -> Curve:
    """The mean of the seeds, and their range."""
    return Curve(name, [place], [runs.mean], low=[min(runs.values)], high=[max(runs.values)])


def published(values: dict[str, float], order: list[str]) -> list[Curve]:
    """Hollow marks of what a paper gives, in the places of ours."""
    return [
        Curve(name, [place], [values[name]], published=True)
        for place, name in enumerate(order)
        if name in values
    ]


def table(scale: Scale, results: list[Result]) -> str:
    """Ours, the best first, beside the published perplexities, which are of words and larger."""
    runs = by_setting(results, bits)
    told = places(runs)
    parameters = by_setting(results, lambda result: result.figures["parameters"])
    head = [
        "system", "parameters", "seeds", "bits per byte", "perplexity of a byte", "place",
        "published, 340 M", "published, 1.3 B",
    ]  # fmt: skip
    rows = [
        [
            title_of(name), f"{parameters[name].mean:,.0f}", str(len(runs[name].values)),
            str(runs[name]), f"{2 ** runs[name].mean:.3f}", told[name],
            str(SMALL.get(name, "-")), str(LARGE.get(name, "-")),
        ]
        for name in sorted(runs, key=lambda name: runs[name].mean)
    ]  # fmt: skip
    note = "The published perplexities are of words of WikiText, not of bytes of this text."
    notes = f"{on_noise(runs)} {note} {text_of(results)}"
    return "\n\n".join([markdown_table(head, rows, results), notes])


ALIKE = (
    "Bits per byte of this text, in place of the perplexity of words of WikiText and the scores on "
    "common sense and recall.",
    "Every recurrent layer has heads of 64 channels and a state of as many rows, in place of the "
    "sizes that each paper chose; convolution and output gate are each layer's own default.",
    "H1's window is half of a row: 2,048 tokens, as in the paper, would be all of it.",
)
EXPERIMENT = Experiment(
    name="language", title="Small language models",
    shows="The loss of small language models of bytes that differ in their mixer alone, at equal "
    "tokens and equal parameters, and how much of the differences is noise.",
    source="DeltaNet (arXiv 2406.06484), table 2; Gated DeltaNet (arXiv 2412.06464), table of "
    "common sense",
    needs={
        "laptop": "3 curves of 3 minutes on 2 cores",
        "gpu": "30 models of 30 M parameters, 7 minutes on one H200 with --workers 10",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "Models of 0.45 M parameters, 2 layers, and 1.5 million bytes of text, in place of "
            "340 M parameters and 15 B tokens.",
            "Three of the ten mixers; one seed.",
            *ALIKE,
        ],
        "gpu": [
            "Models of 30 M parameters, 8 layers, and 9.8 million bytes of text each, in place of "
            "340 M parameters and 15 B tokens: all thirty in minutes.",
            *ALIKE,
        ],
    },
)  # fmt: skip
