"""Parity and modular arithmetic, with eigenvalues in [0, 1] and in [-1, 1]."""

from dataclasses import dataclass, replace
from functools import partial

from bench.markdown import markdown_table
from deltarule.models import CausalLM
from deltarule.tasks import load_task, parity
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves
from experiments.seeds import Runs, by_setting
from experiments.signed_mamba2 import with_signs
from experiments.task_cell import Evaluation, TaskCell, task_cell


@dataclass(frozen=True, kw_only=True)
class StateCell(TaskCell):
    """A cell whose Mamba-2 layers may have signs; of DeltaNet, `model.beta_max` says it."""

    signed: bool = False

    def build(self) -> CausalLM:
        model = super().build()
        return with_signs(model) if self.signed else model


def cells(form: Form) -> list[StateCell]:
    runs = [(x, s, name) for x in form["tasks"] for s in form["seeds"] for name in form["systems"]]
    return [make_cell(form, *run) for run in runs]


def make_cell(form: Form, task: str, seed: int, name: str) -> StateCell:
    config, layer, signed = load_task(task).Config, form["layers_of"][name], name.endswith("11")
    training = config(*form["trained"])
    if form["every_bit"]:
        training = parity.Config(33, 33, every_position=True)
    evaluations = [Evaluation(label_of(form), config(*form["tested"]), form["tested_rows"])]
    evaluations += [
        Evaluation(f"length {n}", config(n, n), form["rows_of_length"]) for n in form["lengths"]
    ]
    model = {"layer_types": layer, "num_layers": form["layers"] + (task != "parity")}
    if layer == "deltanet":
        model["beta_max"] = 2.0 if signed else 1.0
    return task_cell(
        StateCell, form, f"{task}-{name}-seed{seed}", training, evaluations, seed=seed, model=model,
        optimizer={"weight_decay": 0.0 if task == "parity" else 0.1},
        cell={"task": task, "signed": signed and layer == "mamba2"},
    )  # fmt: skip


def label_of(form: Form) -> str:
    return "lengths {} to {}".format(*form["tested"])


def scaled(result: Result, label: str) -> float:
    """Accuracy from 0 for guessing to 1, as the paper has it."""
    accuracy = float(result.figures["evaluations"][label]["accuracy"])
    chance: float = load_task(result.cell["task"]).Config().chance
    return (accuracy - chance) / (1 - chance)


def draw(form: Form, results: list[Result]) -> Figure:
    """For each task the accuracy by length, beside the table with the published figures."""
    runs, panels, tested, titles = by_setting(results), [], label_of(form), form["titles"]
    ticks = [titles[name].replace(" [", "\n[") for name in form["layers_of"]]
    marks = {"longest in training": 33 if form["every_bit"] else form["trained"][1]}
    panel = partial(Panel, y="scaled accuracy", limits=(-0.08, 1.05))
    best = partial(panel, x=tested, title=f"best of three, {tested}", ticks=ticks)
    for task in reversed(form["tasks"]):
        by_length, in_table = [], []
        for place, (name, layer) in enumerate(form["layers_of"].items()):
            seeds, title = runs.get(f"{task}-{name}", []), titles[name]
            # Seeds differ in kind, some solve a task that others do not: a curve for each.
            for run in seeds:
                points = {n: scaled(run, f"length {n}") for n in form["lengths"]}
                by_length.append(Curve(title, points, look=layer))
            if values := [scaled(run, tested) for run in seeds]:
                ours = Curve.through(title, {place: values}, look=layer)
                in_table.append(replace(ours, points={place: max(values)}))
            published = {place: form["published"][name][task]}
            in_table.append(Curve(title, published, published=True, look=layer))
        x = "length of the row"
        panels += [panel(by_length, x, title=titles[task], log_x=True, marks=marks), best(in_table)]
    return draw_curves(panels, title="State tracking", columns=2)


def table(form: Form, results: list[Result]) -> str:
    runs, rows, tested = by_setting(results), [], label_of(form)
    for task in reversed(form["tasks"]):
        for name, published in form["published"].items():
            scores = sorted(scaled(run, tested) for run in runs.get(f"{task}-{name}", []))
            ours = [Runs(scores[-1:]).each(".3f"), Runs(scores).each(".3f")]
            titles = [form["titles"].get(one, one) for one in (task, name)]
            rows.append([*titles, *ours, f"{published[task]:.3f}"])
    head = ["task", "system", "ours, best", "ours, each seed", "published, best of 3"]
    return markdown_table(head, rows)
