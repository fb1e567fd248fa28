"""Parity and modular arithmetic, with eigenvalues in [0, 1] and in [-1, 1]."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.markdown import markdown_table
from deltarule.models import CausalLM
from deltarule.tasks import bracket_arithmetic, modular_arithmetic, parity
from experiments.experiment import Result
from experiments.figures import Curve, Panel, draw_curves
from experiments.seeds import Runs, by_setting
from experiments.signed_mamba2 import with_signs
from experiments.task_cell import Evaluation, TaskCell, task_cell
from experiments.words import Form

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


@dataclass(frozen=True, kw_only=True)
class StateCell(TaskCell):
    """A cell whose Mamba-2 layers may have signs."""

    signed: bool = False
    """Give Mamba-2 eigenvalues in [-1, 1]; of DeltaNet, `model.beta_max` says it."""

    def build(self) -> CausalLM:
        """The model, its layers exchanged for signed ones if there are such."""
        model = super().build()
        return with_signs(model) if self.signed else model


def cells(form: Form) -> list[StateCell]:
    return [
        make_cell(form, task, name, seed)
        for task in form["tasks"]
        for seed in form["seeds"]
        for name in form["systems"]
    ]


def make_cell(form: Form, task: str, name: str, seed: int) -> StateCell:
    """One model; both layers have four heads with keys of hidden_size / 4 channels."""
    config, system, delta = TASKS[task].config, SYSTEMS[name], "deltanet" in name
    training = config(*form["trained"])
    if form["every_bit"]:
        training = parity.Config(33, 33, every_position=True)
    evaluations = [Evaluation(label_of(form), config(*form["tested"]), form["tested_rows"])]
    evaluations += [
        Evaluation(f"length {n}", config(n, n), form["rows_of_length"]) for n in form["lengths"]
    ]
    model = {"layer_types": system.layer, "num_layers": form["layers"] + (task != "parity")}
    if delta:
        model["beta_max"] = 2.0 if system.signed else 1.0
    return task_cell(
        form, f"{task}-{name}-seed{seed}", training, evaluations, seed=seed, model=model,
        optimizer={"weight_decay": 0.0 if task == "parity" else 0.1},
        cell={"task": task, "signed": system.signed and not delta}, kind=StateCell,
    )  # fmt: skip


def label_of(form: Form) -> str:
    return "lengths {} to {}".format(*form["tested"])


def scaled(result: Result, label: str) -> float:
    """Accuracy from 0 for guessing to 1, as the paper has it."""
    accuracy = float(result.figures["evaluations"][label]["accuracy"])
    chance = TASKS[result.cell["task"]].config().chance
    return (accuracy - chance) / (1 - chance)


def draw(form: Form, results: list[Result], path: Path) -> None:
    """For each task the accuracy by length, beside the table with the published figures."""
    runs, panels, tested = by_setting(results), [], label_of(form)
    ticks = [system.title.replace(" [", "\n[") for system in SYSTEMS.values()]
    marks = {"longest in training": 33 if form["every_bit"] else form["trained"][1]}
    panel = partial(Panel, y="scaled accuracy", limits=LIMITS)
    best = partial(panel, x=tested, title=f"best of three, {tested}", ticks=ticks)
    for task in reversed(form["tasks"]):
        by_length, in_table = [], []
        for place, (name, system) in enumerate(SYSTEMS.items()):
            seeds = runs.get(f"{task}-{name}", [])
            # Seeds differ in kind, some solve a task that others do not: a curve for each.
            for run in seeds:
                values = [scaled(run, f"length {n}") for n in form["lengths"]]
                by_length.append(Curve(system.title, form["lengths"], values, look=system.layer))
            if values := [scaled(run, tested) for run in seeds]:
                ours = Curve.through(system.title, {place: values}, look=system.layer)
                in_table.append(replace(ours, y=[max(values)]))
            published = {place: form["published"][name][task]}
            in_table.append(Curve.of_paper(system.title, published, look=system.layer))
        x, title = "length of the row", TASKS[task].title
        panels += [panel(by_length, x, title=title, log_x=True, marks=marks), best(in_table)]
    draw_curves(panels, path, title="State tracking", columns=2)


def table(form: Form, results: list[Result]) -> str:
    """Scaled accuracy of every system, ours beside the published."""
    runs, rows, tested = by_setting(results), [], label_of(form)
    for task in reversed(form["tasks"]):
        for name, published in form["published"].items():
            title = SYSTEMS[name].title if name in SYSTEMS else name
            scores = sorted(scaled(run, tested) for run in runs.get(f"{task}-{name}", []))
            ours = [Runs(scores[-1:]).each(".3f"), Runs(scores).each(".3f")]
            rows.append([TASKS[task].title, title, *ours, f"{published[task]:.3f}"])
    head = ["task", "system", "ours, best", "ours, each seed", "published, best of 3"]
    return markdown_table(head, rows)
