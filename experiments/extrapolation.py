"""Loss by position far past the length of training: recurrent models beside rotary attention."""

from dataclasses import replace
from functools import partial

from bench.markdown import markdown_table
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves, title_of
from experiments.seeds import by_setting, figures_of
from experiments.text_cell import TextCell, text_cells, text_model, text_of

# Tokens of the published models: those of training, and of the measurement.
NEAR, FAR = 4096, 32_768


def cells(form: Form) -> list[TextCell]:
    length, size = form["trained"], form["size"]
    models = {name: text_model(name, size) for name in form["systems"]}
    return [
        replace(
            cell, length=length, rows=cell.rows * cell.length // length,
            lengths=(length, form["read"]),
        )
        for cell in text_cells(models, size, form["seeds"])
    ]  # fmt: skip


def bins(result: Result) -> list[list[float]]:
    """[first, last, bits per byte] of the places in long rows."""
    _, far = result.figures["evaluations"].values()
    return far["positions"]


def draw(form: Form, results: list[Result]) -> Figure:
    """Ours in the middle of each bin of positions, with all seeds, and the two published losses."""
    curves = []
    for name, runs in by_setting(results).items():
        same = zip(*map(bins, runs), strict=True)
        points = {(one[0][0] * one[0][1]) ** 0.5: [value for *_, value in one] for one in same}
        curves.append(Curve.through(name, points))
    panel = partial(Panel, log_x=True)
    ours = panel(
        curves, "position in the row, bytes", "bits per byte, held out",
        marks={f"trained to {form['trained']:,}": form["trained"]},
    )  # fmt: skip
    given = form["published"]
    near, far = (max(row[length] for row in given.values()) for length in (NEAR, FAR))
    published = panel(
        [Curve(name, {FAR: row[FAR]}, published=True) for name, row in given.items()],
        "position in the row, tokens of code", "nats per token", "published, trained to 4,096",
        levels={"at 4,096": near}, limits=(near - 0.08, far + 0.05),
    )  # fmt: skip
    return draw_curves([ours, published], title="Loss past the length of training")


def at(length: int, result: Result) -> float:
    """Bits per byte of the bin that ends there."""
    return next(bits for _, last, bits in bins(result) if last == length)


def table(form: Form, results: list[Result]) -> str:
    """Bits per byte in the last half of rows of several lengths, and what the longest costs."""
    trained, read, rows = form["trained"], form["read"], []
    lengths = [trained * factor for factor in (1, 4, 16, 32) if trained * factor <= read]
    columns = [figures_of(results, partial(at, length)) for length in lengths]
    for name in columns[0]:
        ours = [column[name] for column in columns]
        change, given = ours[-1].mean - ours[0].mean, form["published"].get(name)
        theirs = f"{given[FAR] - given[NEAR]:+.2f} (8 x the length)" if given else "-"
        rows.append([title_of(name), *map(str, ours), f"{change:+.3f}", theirs])
    note = (
        f"Bits per byte at positions from half of each length to it, in rows of {read:,} "
        f"bytes within one document; trained on rows of {trained:,}. {text_of(results)}"
    )
    head = ["system", *(f"at {length:,}" for length in lengths), "change", "published change, nats"]
    return f"{markdown_table(head, rows)}\n\n{note}"
