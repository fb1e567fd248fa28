"""What the parts of a delta-rule layer are worth: norm, feature map, convolution, gate, heads."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from experiments.experiment import Experiment, Result, Scale
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.markdown import markdown_table
from experiments.seeds import by_setting, on_noise
from experiments.text_cell import TextCell
from experiments.text_setting import Size, bits, text_cell, text_model, text_of

SEEDS: dict[Scale, tuple[int, ...]] = {"laptop": (0,), "gpu": (0, 1)}
SIZES: dict[Scale, Size] = {"laptop": "laptop", "gpu": "small"}


Changes = dict[str, Any]


class Variant(NamedTuple):
    """One layer with one or two of its parts changed.

    changes: Fields of `ModelConfig`.
    deltanet: Published perplexity of DeltaNet 340 M, arXiv 2406.06484, table 2.
    gated: Published mean perplexity of Gated DeltaNet 400 M, arXiv 2412.06464, table on the block.
    """

    mixer: str
    title: str
    changes: Changes
    deltanet: float | None = None
    gated: float | None = None


def mapped(
    norm: str, feature_map: str, deltanet: float | None = None, gated: float | None = None
) -> Variant:
    """DeltaNet with another norm and feature map of queries and keys."""
    words = {"l1": "L1", "l2": "L2", "relu": "ReLU", "elu": "1+ELU", "silu": "SiLU"}
    changes = {"qk_norm": norm, "feature_map": feature_map}
    return Variant("deltanet", f"{words[norm]}, {words[feature_map]}", changes, deltanet, gated)


def gated(title: str, published: float, head: int = 128, changes: Changes | None = None) -> Variant:
    """Gated DeltaNet with heads of this size over the 256 channels of the model."""
    sizes = {"num_heads": 256 // head, "head_k_dim": head, "head_v_dim": head}
    return Variant("gated_deltanet", title, sizes | (changes or {}), gated=published)


VARIANTS = {
    "deltanet-l2-silu": mapped("l2", "silu", 28.24, 27.35),
    "deltanet-l2-elu": mapped("l2", "elu", 28.03, 27.58),
    "deltanet-l2-relu": mapped("l2", "relu", 28.75, 27.67),
    "deltanet-l1-silu": mapped("l1", "silu", None, 30.18),
    "deltanet-l1-elu": mapped("l1", "elu", 31.12, 30.34),
    "deltanet-l1-relu": mapped("l1", "relu", None, 30.79),
    "deltanet-no-conv": Variant("deltanet", "no convolution", {"conv_size": 0}, 29.08),
    "gated-head-128": gated("heads of 128", 27.35),
    "gated-head-64": gated("heads of 64", 28.31, 64),
    "gated-head-256": gated("heads of 256", 27.13, 256),
    "gated-no-conv": gated("no convolution", 28.95, changes={"conv_size": 0}),
    "gated-no-gate": gated("no output gate", 29.12, changes={"output_gate": False}),
}
ON_A_LAPTOP = ("deltanet-l2-silu", "deltanet-l1-elu")


def cells(scale: Scale) -> list[TextCell]:
    """A model for each variant and seed."""
    made, size = [], SIZES[scale]
    for seed in SEEDS[scale]:
        for name in ON_A_LAPTOP if scale == "laptop" else VARIANTS:
            variant = VARIANTS[name]
            model = dataclasses.replace(text_model(variant.mixer, size), **variant.changes)
            made.append(text_cell(name, model, size, seed))
    return made


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """A row for each layer: ours, and the published perplexities in the same places."""
    runs = by_setting(results, bits)
    panels = []
    for mixer, column in (("deltanet", "deltanet"), ("gated_deltanet", "gated")):
        names = [name for name in runs if VARIANTS[name].mixer == mixer]
        if not names:
            continue
        given = [(x, getattr(VARIANTS[name], column)) for x, name in enumerate(names)]
        told = [(x, value) for x, value in given if value is not None]
        ours = Curve(
            mixer, range(len(names)), [runs[name].mean for name in names],
            low=[min(runs[name].values) for name in names],
            high=[max(runs[name].values) for name in names],
        )  # fmt: skip
        theirs = Curve(mixer, [x for x, _ in told], [value for _, value in told], published=True)
        ticks = [short(VARIANTS[name].title) for name in names]
        size = "340 M" if mixer == "deltanet" else "400 M"
        panels += [
            Panel([ours], x="variant", y="bits per byte, held out", title=title_of(mixer),
                  ticks=ticks),
            Panel([theirs], x="variant", y="perplexity of a word", title=f"published, {size}",
                  ticks=ticks),
        ]  # fmt: skip
    draw_curves(panels, path, title="Parts of a delta-rule layer", columns=2)


def short(title: str) -> str:
    """A title in two lines that fit below a point.

    Examples:
        >>> short("no convolution")
        'no\\nconv.'
    """
    words = title.replace("convolution", "conv.").replace("output ", "")
    return words.replace(" ", "\n", 1)


def table(scale: Scale, results: list[Result]) -> str:
    """Ours beside the perplexities of both papers."""
    runs = by_setting(results, bits)
    head = [
        "layer", "variant", "bits per byte", "published, DeltaNet 340 M",
        "published, Gated DeltaNet 400 M",
    ]  # fmt: skip
    rows = [
        [
            title_of(VARIANTS[name].mixer), VARIANTS[name].title, str(run),
            *("-" if x is None else str(x) for x in VARIANTS[name][-2:]),
        ]
        for name, run in runs.items()
    ]  # fmt: skip
    notes = f"{on_noise(runs)} {text_of(results)}"
    return "\n\n".join([markdown_table(head, rows, results), notes])


LEFT_OUT = (
    "Left out: Gated DeltaNet's own grid of norm and feature map, its naive delta rule and its "
    "missing output norm. The grid is run on DeltaNet."
)
EXPERIMENT = Experiment(
    name="ablation", title="Parts of a delta-rule layer",
    shows="What the norm and the feature map of queries and keys, the short convolution, the "
    "output gate and the size of a head are worth in a small language model.",
    source="DeltaNet (arXiv 2406.06484), table 2; Gated DeltaNet (arXiv 2412.06464), ablation of "
    "the block",
    needs={
        "laptop": "2 curves of 3 minutes on 2 cores",
        "gpu": "24 models of 3.3 M parameters, 4 minutes on one H200 with --workers 8",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "Two variants: L2 norm and SiLU, L1 norm and 1+ELU.",
            "Models of 0.45 M parameters and 1.5 million bytes of text, in place of 340 M and 15 B "
            "tokens; bits per byte in place of the perplexity of words.",
            "Heads of 64 channels, in place of 128; one seed.",
        ],
        "gpu": [
            "Models of 3.3 M parameters and 8.2 million bytes of text, in place of 340 M and 400 M "
            "parameters and 15 B tokens; bits per byte in place of the perplexity of words.",
            "DeltaNet with heads of 64 channels, in place of 128.",
            "Gated DeltaNet with values as wide as keys, in place of twice as wide.",
            "Parameters that a part takes go into the MLP when it is left out; two seeds each.",
            LEFT_OUT,
        ],
    },
)  # fmt: skip
