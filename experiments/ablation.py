"""What the parts of a delta-rule layer are worth: norm, feature map, convolution, gate, heads."""

from dataclasses import replace

from bench.markdown import markdown_table
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves, title_of
from experiments.seeds import figures_of, on_noise, told
from experiments.text_cell import TextCell, bits, text_cells, text_model, text_of

PAPERS = {"deltanet": "DeltaNet 340 M", "gated_deltanet": "Gated DeltaNet 400 M"}


def cells(form: Form) -> list[TextCell]:
    variants = {name: form["variants"][name] for name in form.get("run") or form["variants"]}
    models = {
        name: replace(text_model(variant["layer"], form["size"]), **variant["changes"])
        for name, variant in variants.items()
    }
    return text_cells(models, form["size"], form["seeds"])


def draw(form: Form, results: list[Result]) -> Figure:
    """A row for each layer: ours, and the published perplexities in the same places."""
    runs, variants, panels = figures_of(results, bits), form["variants"], []
    for layer, paper in PAPERS.items():
        names = [name for name in runs if variants[name]["layer"] == layer]
        if not names:
            continue
        ours = Curve.through(layer, {x: runs[name].values for x, name in enumerate(names)})
        given = {x: form["published"][name].get(paper) for x, name in enumerate(names)}
        theirs = {x: value for x, value in given.items() if value}
        # In two lines that fit below a point.
        ticks = [
            variants[name]["title"].replace("convolution", "conv.").replace("output ", "")
            .replace(" ", "\n", 1)
            for name in names
        ]  # fmt: skip
        published, title = Curve(layer, theirs, published=True), f"published, {paper[-5:]}"
        panels += [
            Panel([ours], "variant", "bits per byte, held out", title_of(layer), ticks),
            Panel([published], "variant", "perplexity of a word", title, ticks),
        ]
    return draw_curves(panels, title="Parts of a delta-rule layer", columns=2)


def table(form: Form, results: list[Result]) -> str:
    runs, rows = figures_of(results, bits), []
    for name, run in runs.items():
        variant, theirs = form["variants"][name], form["published"][name]
        published = [told(theirs, paper) for paper in PAPERS.values()]
        rows.append([title_of(variant["layer"]), variant["title"], str(run), *published])
    head = ["layer", "variant", "bits per byte", *(f"published, {x}" for x in PAPERS.values())]
    return f"{markdown_table(head, rows)}\n\n{on_noise(runs)} {text_of(results)}"
