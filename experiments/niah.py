"""Needles in haystacks of repeated sentences and of prose, past the length that was trained."""

from dataclasses import dataclass
from functools import partial
from types import ModuleType

from bench.markdown import markdown_table
from deltarule.tasks.niah import Config
from deltarule.train.labelled import Curriculum
from experiments import pinned
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves, title_of
from experiments.seeds import Runs, by_setting, told
from experiments.task_cell import Evaluation, TaskCell, task_cell

# Those with decays, which also run with the papers' draw of them.
GATED = ("mamba2", "gated_deltanet")


@dataclass(frozen=True, kw_only=True)
class NeedleCell(TaskCell):
    """One small model, and needles in pinned prose; cells in other prose are other cells."""

    text: str

    def rows_of(self) -> ModuleType:
        return pinned


def cells(form: Form) -> list[NeedleCell]:
    """Each state is of num_heads square memories of 64 channels in both layers."""
    training = Config(**form["training"])

    tested = partial(Config, instructions=training.instructions, split="validation")
    evaluations = [
        Evaluation(f"{needle}, {n}", tested(**form["kinds"][needle], length=n), form["tested"])
        for n in form["lengths"]
        for needle in form["needles"]
    ]
    curriculum = Curriculum(**form["curriculum"]) if "curriculum" in form else None
    longest = dict.fromkeys(GATED, form.get("longest_horizon"))
    runs = [(x, "", seed, longest.get(x)) for seed in form["seeds"] for x in form["systems"]]
    runs += [(x, "-drawn", seed, None) for seed in form["drawn_seeds"] for x in GATED]
    return [
        task_cell(
            NeedleCell, form, f"{system}{drawn}-seed{seed}", training, evaluations, seed=seed,
            model={"layer_types": system, "longest_horizon": horizon},
            cell={"curriculum": curriculum, "text": pinned.SHA256},
        )
        for system, drawn, seed, horizon in runs
    ]  # fmt: skip


def shares(runs: list[Result], needle: str, length: int) -> Runs:
    """Percent of rows whose value is right to the last byte, of each seed."""
    figures = [run.figures["evaluations"][f"{needle}, {length}"] for run in runs]
    return Runs([100 * float(one["sequence_accuracy"]) for one in figures])


def draw(form: Form, results: list[Result]) -> Figure:
    """Ours by length above, a curve for each seed, as they differ in kind; the published below.

    Those are of other models and in other tokens.
    """
    runs, lengths = by_setting(results), form["lengths"]
    panel = partial(Panel, y="values right, %", log_x=True, limits=(-3, 105))
    ours, published = [], []
    for needle in form["needles"]:
        curves = [
            Curve(name, {n: shares([run], needle, n).mean for n in lengths})
            for name in form["systems"]
            for run in runs.get(name, [])
        ]
        ours.append(panel(curves, "bytes", title=f"{needle}, ours", marks={"trained": lengths[0]}))
        curves = [
            Curve(row.split()[1], {1024 * n: x for n, x in points.items()}, published=True)
            for row, points in form["published"].items()
            if row.startswith(needle)
        ]
        published.append(panel(curves, "Llama-2 tokens", title=f"{needle}, published"))
    columns = len(form["needles"])
    return draw_curves([*ours, *published], title="Needles in haystacks", columns=columns)


def table(form: Form, results: list[Result]) -> str:
    """Ours and the published; then what each run of a gated system started with, where it ended."""
    runs, rows, lengths = by_setting(results), [], form["lengths"]
    for needle in form["needles"]:
        for system in form["systems"]:
            ours = [shares(runs.get(system, []), needle, n).each(".1f") for n in lengths]
            published = form["published"].get(f"{needle} {system}", {})
            theirs = [told(published, n, ".1f") for n in (1, 2, 4, 8)]
            rows.append([needle, title_of(system), *ours, *theirs])
    head = ["needle", "system", *(f"{n:,} bytes" for n in lengths)]
    whole = markdown_table([*head, *(f"published, {n}K" for n in (1, 2, 4, 8))], rows)
    needle, length, rows = form["needles"][0], lengths[0], []
    spread = f"spread to {form.get('longest_horizon', 0):,}"
    for system in GATED:
        for name, start in ((system, spread), (f"{system}-drawn", "the papers' draw")):
            for run in runs.get(name, []):
                if layers := run.figures.get("horizons"):
                    horizons = "; ".join(", ".join(f"{x:,.0f}" for x in layer) for layer in layers)
                    cells = [title_of(system), start, run.name.rpartition("seed")[2], horizons]
                    rows.append([*cells, shares([run], needle, length).each(".1f")])
    head = ["system", "heads start", "seed", "horizons in tokens, layer by layer"]
    starts = markdown_table([*head, f"{needle}, {length:,} bytes"], rows)
    return f"{whole}\n\n{starts}" if rows else whole
