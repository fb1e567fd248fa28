"""What the parts of a delta-rule layer are worth: norm, feature map, convolution, gate, heads."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from bench.markdown import markdown_table
from experiments.experiment import Experiment, Result
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.seeds import figures_of, on_noise
from experiments.settings import read_settings
from experiments.text_cell import TextCell
from experiments.text_setting import bits, text_cells, text_model, text_of
from experiments.words import Scale, read_words

FORMS = read_settings("ablation")


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


def cells(scale: Scale) -> list[TextCell]:
    form = FORMS[scale]
    models = {
        name: dataclasses.replace(
            text_model(VARIANTS[name].mixer, form["size"]), **VARIANTS[name].changes
        )
        for name in form["variants"]
    }
    return text_cells(models, form["size"], form["seeds"])


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """A row for each layer: ours, and the published perplexities in the same places."""
    runs, panels = figures_of(results, bits), []
    for mixer, column, size in (
        ("deltanet", "deltanet", "340 M"),
        ("gated_deltanet", "gated", "400 M"),
    ):
        names = [name for name in runs if VARIANTS[name].mixer == mixer]
        if not names:
            continue
        ours = Curve.through(mixer, {x: runs[name].values for x, name in enumerate(names)})
        given = {x: getattr(VARIANTS[name], column) for x, name in enumerate(names)}
        theirs = Curve.of_paper(mixer, {x: value for x, value in given.items() if value})
        ticks, title = [short(VARIANTS[name].title) for name in names], f"published, {size}"
        panels += [
            Panel([ours], "variant", "bits per byte, held out", title_of(mixer), ticks),
            Panel([theirs], "variant", "perplexity of a word", title, ticks),
        ]
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
    runs, rows = figures_of(results, bits), []
    for name, run in runs.items():
        mixer, title, _, *published = VARIANTS[name]
        theirs = ["-" if perplexity is None else str(perplexity) for perplexity in published]
        rows.append([title_of(mixer), title, str(run), *theirs])
    head = ["layer", "variant", "bits per byte"]
    head += ["published, DeltaNet 340 M", "published, Gated DeltaNet 400 M"]
    return f"{markdown_table(head, rows)}\n\n{on_noise(runs)} {text_of(results)}"


EXPERIMENT = Experiment(
    name="ablation", words=read_words("ablation"), cells=cells, draw=draw, table=table
)
