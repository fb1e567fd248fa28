"""Small language models that differ in their mixer alone: equal tokens, equal parameters."""

from functools import partial

from bench.markdown import markdown_table
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves, title_of
from experiments.seeds import by_setting, figures_of, on_noise, told
from experiments.text_cell import TextCell, bits, text_cells, text_model, text_of


def cells(form: Form) -> list[TextCell]:
    models = {name: text_model(name, form["size"]) for name in form["systems"]}
    return text_cells(models, form["size"], form["seeds"])


def learning_curve(name: str, results: list[Result]) -> Curve:
    """Bits per byte over the million bytes trained on, and the range over the seeds."""
    cell = results[0].cell
    each = cell["rows"] * cell["length"] / 1e6
    courses = zip(*(result.figures["curve"] for result in results), strict=False)
    points = {points[0][0] * each: [value for _, value in points] for points in courses}
    return Curve.through(name, points)


def draw(form: Form, results: list[Result]) -> Figure:
    """The course of training, the final loss of each seed, and the published perplexities."""
    runs, found = by_setting(results), figures_of(results, bits)
    order = sorted(found, key=lambda name: found[name].mean)
    courses = [learning_curve(name, runs[name]) for name in order]
    at_the_end = [Curve.through(x, {place: found[x].values}) for place, x in enumerate(order)]
    published = [
        Curve(name, {place: form["published"][name]["1.3 B"]}, published=True)
        for place, name in enumerate(order)
        if "1.3 B" in form["published"].get(name, {})
    ]
    by_system = partial(Panel, x="system", ticks=[form["letters"][name] for name in order])
    held_out = "bits per byte, held out"
    panels = [
        Panel(courses, "million bytes trained on", held_out),
        by_system(at_the_end, y=held_out, title="at the end, range of the seeds"),
        by_system(published, y="perplexity of a word, WikiText", title="published, 1.3 B"),
    ]
    return draw_curves(panels, title="Small language models at equal tokens and parameters")


def table(form: Form, results: list[Result]) -> str:
    runs = figures_of(results, bits)
    parameters = figures_of(results, lambda result: result.figures["parameters"])
    rows = []
    for name in sorted(runs, key=lambda name: runs[name].mean):
        run, published = runs[name], form["published"].get(name, {})
        ours = [str(len(run.values)), str(run), f"{2**run.mean:.3f}"]
        theirs = [told(published, size) for size in ("340 M", "1.3 B")]
        rows.append([title_of(name), f"{parameters[name].mean:,.0f}", *ours, *theirs])
    head = ["system", "parameters", "seeds", "bits per byte", "perplexity of a byte"]
    board = markdown_table([*head, "published, 340 M", "published, 1.3 B"], rows)
    note = "The published perplexities are of words of WikiText, not of bytes of this text."
    return f"{board}\n\n{on_noise(runs)} {note} {text_of(results)}"
