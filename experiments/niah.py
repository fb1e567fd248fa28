"""Needles in haystacks of repeated sentences and of prose, past the length that was trained."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from bench.markdown import markdown_table
from deltarule.tasks.niah import Config, Haystack, Value
from deltarule.train.task_rows import Curriculum
from experiments import pinned_needles
from experiments.experiment import Result
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.pinned_text import SHA256
from experiments.seeds import Runs, by_setting
from experiments.task_cell import Evaluation, TaskCell, task_cell
from experiments.words import Form

# Those with decays, which also run with the papers' draw of them.
GATED = ("mamba2", "gated_deltanet")
NEEDLES: dict[str, tuple[Haystack, Value]] = {
    "S-NIAH-1": ("noise", "number"),
    "S-NIAH-2": ("prose", "number"),
    "S-NIAH-3": ("prose", "uuid"),
}


@dataclass(frozen=True, kw_only=True)
class NeedleCell(TaskCell):
    """One small model, and needles in pinned prose."""

    text: str
    """That the prose is of: cells in other prose are other cells."""

    def rows_of(self) -> ModuleType:
        """The task in the prose of every other machine."""
        return pinned_needles


def cells(form: Form) -> list[NeedleCell]:
    spread = [make_cell(form, name, seed) for seed in form["seeds"] for name in form["systems"]]
    drawn = [
        make_cell(form, name, seed, "-drawn") for seed in form["drawn_seeds"] for name in GATED
    ]
    return spread + drawn


def make_cell(form: Form, system: str, seed: int, drawn: str = "") -> NeedleCell:
    """One model; each state is of num_heads square memories of 64 channels in both layers."""
    evaluations = [
        Evaluation(label_of(needle, length), tested(form, needle, length), form["tested"])
        for length in form["lengths"]
        for needle in form["needles"]
    ]
    horizon = form.get("longest_horizon") if system in GATED and not drawn else None
    curriculum = Curriculum(**form["curriculum"]) if "curriculum" in form else None
    return task_cell(
        form, f"{system}{drawn}-seed{seed}", Config(**form["training"]), evaluations, seed=seed,
        model={"layer_types": system, "longest_horizon": horizon},
        cell={"curriculum": curriculum, "text": SHA256}, kind=NeedleCell,
    )  # fmt: skip


def tested(form: Form, needle: str, length: int) -> Config:
    """Rows of one needle and length, in prose that training never sees."""
    haystack, value = NEEDLES[needle]
    instructions = Config(**form["training"]).instructions
    return Config(haystack, value, length, instructions=instructions, split="validation")


def label_of(needle: str, length: int) -> str:
    """The key of an evaluation.

    Examples:
        >>> label_of("S-NIAH-1", 1024)
        'S-NIAH-1, 1024'
    """
    return f"{needle}, {length}"


def shares(runs: list[Result], needle: str, length: int) -> Runs:
    """Percent of rows whose value is right to the last byte, of each seed."""
    figures = [run.figures["evaluations"][label_of(needle, length)] for run in runs]
    return Runs([100 * float(one["sequence_accuracy"]) for one in figures])


def draw(form: Form, results: list[Result], path: Path) -> None:
    """Ours by length above, a curve for each seed, as they differ in kind; the published below.

    Those are of other models and in other tokens.
    """
    runs = by_setting(results)
    panel = partial(Panel, y="values right, %", log_x=True, limits=(-3, 105))
    ours, published = [], []
    for needle in form["needles"]:
        curves = [
            Curve(name, form["lengths"], [shares([run], needle, n).mean for n in form["lengths"]])
            for name in form["systems"]
            for run in runs.get(name, [])
        ]
        marks = {"trained": form["lengths"][0]}
        ours.append(panel(curves, "bytes", title=f"{needle}, ours", marks=marks))
        curves = [
            Curve.of_paper(row.split()[1], {1024 * n: percent for n, percent in points.items()})
            for row, points in form["published"].items()
            if row.startswith(needle)
        ]
        published.append(panel(curves, "Llama-2 tokens", title=f"{needle}, published"))
    draw_curves(
        [*ours, *published], path, title="Needles in haystacks", columns=len(form["needles"])
    )


def table(form: Form, results: list[Result]) -> str:
    runs, rows = by_setting(results), []
    for needle in form["needles"]:
        for system in form["systems"]:
            ours = [shares(runs.get(system, []), needle, n).each(".1f") for n in form["lengths"]]
            published = form["published"].get(f"{needle} {system}", {})
            theirs = [f"{published[n]:.1f}" if n in published else "-" for n in (1, 2, 4, 8)]
            rows.append([needle, title_of(system), *ours, *theirs])
    head = ["needle", "system", *(f"{n:,} bytes" for n in form["lengths"])]
    head += [f"published, {n}K" for n in (1, 2, 4, 8)]
    return "\n\n".join([markdown_table(head, rows), *starts(form, runs)])


def starts(form: Form, runs: dict[str, list[Result]]) -> list[str]:
    """What each run of a gated system started with, and where it ended; empty without such runs."""
    needle, length, rows = form["needles"][0], form["lengths"][0], []
    for system in GATED:
        for name, start in {
            system: f"spread to {form.get('longest_horizon', 0):,}",
            f"{system}-drawn": "the papers' draw",
        }.items():
            for run in runs.get(name, []):
                if layers := run.figures.get("horizons"):
                    horizons = "; ".join(", ".join(f"{x:,.0f}" for x in layer) for layer in layers)
                    cells = [title_of(system), start, run.name.rpartition("seed")[2], horizons]
                    rows.append([*cells, shares([run], needle, length).each(".1f")])
    head = ["system", "heads start", "seed", "horizons in tokens, layer by layer"]
    return [markdown_table([*head, f"{needle}, {length:,} bytes"], rows)] if rows else []
