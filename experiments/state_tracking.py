"""Parity and modular arithmetic, with eigenvalues in [0, 1] and in [-1, 1]."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.markdown import markdown_table
from deltarule.models import CausalLM
from deltarule.tasks import bracket_arithmetic, modular_arithmetic, parity
from experiments.experiment import Experiment, Result
from experiments.figures import Curve, Panel, draw_curves
from experiments.seeds import Runs, by_setting
from experiments.settings import Form, read_settings
from experiments.signed_mamba2 import with_signs
from experiments.task_cell import Evaluation, TaskCell, task_cell
from experiments.words import Scale, read_words

SEEDS = (0, 1, 2)
# As in the paper: trained on rows of at most 40 places, tested on 40 to 256.
TRAINED, TESTED = (3, 40), (40, 256)
LABEL, ROWS = "lengths 40 to 256", 8192
LENGTHS, ROWS_OF_LENGTH = (32, 64, 128, 256), 1024
LIMITS = (-0.08, 1.05)


class System(NamedTuple):
    """A layer with one range of eigenvalues."""

    layer: str
    title: str
    signed: bool
    """Whether eigenvalues reach -1."""


SYSTEMS = {
    "deltanet01": System("deltanet", "DeltaNet [0, 1]", signed=False),
    "deltanet11": System("deltanet", "DeltaNet [-1, 1]", signed=True),
    "mamba01": System("mamba2", "Mamba-2 [0, 1]", signed=False),
    "mamba11": System("mamba2", "Mamba-2 [-1, 1]", signed=True),
}


class Task(NamedTuple):
    """One column of the table."""

    title: str
    config: type[parity.Config] | type[modular_arithmetic.Config] | type[bracket_arithmetic.Config]


TASKS = {
    "parity": Task("Parity", parity.Config),
    "modular_arithmetic": Task("Modular arithmetic without brackets", modular_arithmetic.Config),
    "bracket_arithmetic": Task("Modular arithmetic with brackets", bracket_arithmetic.Config),
}
WORDS, FORMS = read_words("state-tracking"), read_settings("state-tracking")


@dataclass(frozen=True, kw_only=True)
class StateCell(TaskCell):
    """A cell whose Mamba-2 layers may have signs."""

    signed: bool = False
    """Give Mamba-2 eigenvalues in [-1, 1]; of DeltaNet, `model.beta_max` says it."""

    def build(self) -> CausalLM:
        """The model, its layers exchanged for signed ones if there are such."""
        model = super().build()
        return with_signs(model) if self.signed else model


def cells(scale: Scale) -> list[StateCell]:
    form = FORMS[scale]
    return [
        make_cell(form, task, name, seed)
        for task in form["tasks"]
        for seed in SEEDS
        for name in SYSTEMS
    ]


def make_cell(form: Form, task: str, name: str, seed: int) -> StateCell:
    """One model; both layers have four heads with keys of hidden_size / 4 channels."""
    config, system, delta = TASKS[task].config, SYSTEMS[name], "deltanet" in name
    training = config(*TRAINED)
    if form["every_bit"]:
        training = parity.Config(33, 33, every_position=True)
    evaluations = [Evaluation(LABEL, config(*TESTED), ROWS)]
    evaluations += [Evaluation(f"length {n}", config(n, n), ROWS_OF_LENGTH) for n in LENGTHS]
    model = {"layer_types": system.layer, "num_layers": form["layers"] + (task != "parity")}
    if delta:
        model["beta_max"] = 2.0 if system.signed else 1.0
    return task_cell(
        form,
        f"{task}-{name}-seed{seed}",
        training,
        evaluations,
        seed=seed,
        model=model,
        optimizer={"weight_decay": 0.0 if task == "parity" else 0.1},
        cell={"task": task, "signed": system.signed and not delta},
        kind=StateCell,
    )


def scaled(result: Result, label: str = LABEL) -> float:
    """Accuracy from 0 for guessing to 1, as the paper has it."""
    accuracy = float(result.figures["evaluations"][label]["accuracy"])
    chance = TASKS[result.cell["task"]].config().chance
    return (accuracy - chance) / (1 - chance)


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """For each task the accuracy by length, beside the table with the published figures."""
    runs, panels = by_setting(results), []
    ticks = [system.title.replace(" [", "\n[") for system in SYSTEMS.values()]
    marks = {"longest in training": 33 if FORMS[scale]["every_bit"] else TRAINED[1]}
    panel = partial(Panel, y="scaled accuracy", limits=LIMITS)
    best = partial(panel, x=LABEL, title="best of three, lengths 40 to 256", ticks=ticks)
    for task in reversed(FORMS[scale]["tasks"]):
        by_length, in_table = [], []
        for place, (name, system) in enumerate(SYSTEMS.items()):
            seeds = runs.get(f"{task}-{name}", [])
            # Seeds differ in kind, some solve a task that others do not: a curve for each.
            for run in seeds:
                values = [scaled(run, f"length {n}") for n in LENGTHS]
                by_length.append(Curve(system.title, LENGTHS, values, look=system.layer))
            if values := [scaled(run) for run in seeds]:
                ours = Curve.through(system.title, {place: values}, look=system.layer)
                in_table.append(replace(ours, y=[max(values)]))
            published = {place: WORDS.published[name][task]}
            in_table.append(Curve.of_paper(system.title, published, look=system.layer))
        x, title = "length of the row", TASKS[task].title
        panels += [panel(by_length, x, title=title, log_x=True, marks=marks), best(in_table)]
    draw_curves(panels, path, title="State tracking", columns=2)


def table(scale: Scale, results: list[Result]) -> str:
    """Scaled accuracy of every system, ours beside the published."""
    runs, rows = by_setting(results), []
    for task in reversed(FORMS[scale]["tasks"]):
        for name, published in WORDS.published.items():
            title = SYSTEMS[name].title if name in SYSTEMS else name
            scores = sorted(map(scaled, runs.get(f"{task}-{name}", [])))
            ours = [Runs(scores[-1:]).each(".3f"), Runs(scores).each(".3f")]
            rows.append([TASKS[task].title, title, *ours, f"{published[task]:.3f}"])
    head = ["task", "system", "ours, best", "ours, each seed", "published, best of 3"]
    return markdown_table(head, rows)


EXPERIMENT = Experiment(name="state-tracking", words=WORDS, cells=cells, draw=draw, table=table)
