"""What the parts of a delta-rule layer are worth: norm, feature map, convolution, gate, heads."""

import dataclasses
from pathlib import Path

from bench.markdown import markdown_table
from experiments.experiment import Result
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.seeds import figures_of, on_noise
from experiments.text_cell import TextCell
from experiments.text_setting import bits, text_cells, text_model, text_of
from experiments.words import Form

PAPERS = {"deltanet": "DeltaNet 340 M", "gated_deltanet": "Gated DeltaNet 400 M"}


def cells(form: Form) -> list[TextCell]:
    variants = form["variants"]
    models = {
        name: dataclasses.replace(
            text_model(variants[name]["layer"], form["size"]), **variants[name]["changes"]
        )
        for name in form.get("run") or variants
    }
    return text_cells(models, form["size"], form["seeds"])


def draw(form: Form, results: list[Result], path: Path) -> None:
    """A row for each layer: ours, and the published perplexities in the same places."""
    runs, variants, panels = figures_of(results, bits), form["variants"], []
    for layer, paper in PAPERS.items():
        names = [name for name in runs if variants[name]["layer"] == layer]
        if not names:
            continue
        ours = Curve.through(layer, {x: runs[name].values for x, name in enumerate(names)})
        given = {x: form["published"][name].get(paper) for x, name in enumerate(names)}
        theirs = Curve.of_paper(layer, {x: value for x, value in given.items() if value})
        ticks = [short(variants[name]["title"]) for name in names]
        title = f"published, {paper[-5:]}"
        panels += [
            Panel([ours], "variant", "bits per byte, held out", title_of(layer), ticks),
            Panel([theirs], "variant", "perplexity of a word", title, ticks),
        ]
    draw_curves(panels, path, title="Parts of a delta-rule layer", columns=2)


def short(title: str) -> str:
    """A title in two lines that fit below a point."""
    words = title.replace("convolution", "conv.").replace("output ", "")
    return words.replace(" ", "\n", 1)


def table(form: Form, results: list[Result]) -> str:
    """Ours beside the perplexities of both papers."""
    runs, rows = figures_of(results, bits), []
    for name, run in runs.items():
        theirs = [str(form["published"][name].get(paper, "-")) for paper in PAPERS.values()]
        variant = form["variants"][name]
        rows.append([title_of(variant["layer"]), variant["title"], str(run), *theirs])
    head = ["layer", "variant", "bits per byte", *(f"published, {x}" for x in PAPERS.values())]
    return f"{markdown_table(head, rows)}\n\n{on_noise(runs)} {text_of(results)}"
