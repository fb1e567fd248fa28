"""MAD: six small tasks that tell layers apart; table 1 of DeltaNet, at its baseline settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.markdown import markdown_table
from deltarule.tasks import load_task
from experiments.autoencoder import AutoencoderCell
from experiments.experiment import Result
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.task_cell import Evaluation, TaskCell, accuracy, in_training, task_cell
from experiments.words import Form

# GLA is published without one.
NO_CONVOLUTION = ("gla", "attention")
LABEL, ROWS = "new rows", 1280


def measured(task: Form) -> Any:
    """A task's configuration in the test."""
    return load_task(task["task"]).Config(**task.get("config", {}))


def in_lessons(task: Form) -> Any:
    """The configuration in training, where in some tasks every next token is a label."""
    config = measured(task)
    return replace(config, training=True) if hasattr(config, "training") else config


def cells(form: Form) -> list[TaskCell]:
    return [make_cell(form, name, layer) for name in form["tasks"] for layer in form["layers"]]


def make_cell(form: Form, name: str, layer: str) -> TaskCell:
    """One model of two blocks, mixer and MLP."""
    task = form["each"] | form["tasks"][name]
    every = task["steps"] // form["evaluations"]
    return task_cell(
        form, f"{name}-{layer}", in_lessons(task), [Evaluation(LABEL, measured(task), ROWS)],
        model={"layer_types": layer, "conv_size": 0 if layer in NO_CONVOLUTION else 4},
        loop={"steps": task["steps"], "evaluate_every": every},
        cell={"task": task["task"], "rows": task["rows"], "examples": task.get("examples")},
        kind=AutoencoderCell if task["task"] == "mad_compression" else TaskCell,
    )  # fmt: skip


def of_task(form: Form, name: str, results: list[Result]) -> dict[str, Result]:
    done = {result.name: result for result in results}
    return {layer: run for layer in form["layers"] if (run := done.get(f"{name}-{layer}"))}


def draw(form: Form, results: list[Result], path: Path) -> None:
    """Accuracy in training, a panel a task; the published scores at its end."""
    panels, given = [], form["published"]
    for name, task in form["tasks"].items():
        runs, last = of_task(form, name, results), task.get("steps", form["each"]["steps"])
        curves = [in_training(layer, result) for layer, result in runs.items()]
        curves += [
            Curve.of_paper(layer, {last: given[layer][name] / 100})
            for layer in runs
            if layer in given
        ]
        levels, limits = {"chance": measured(task).chance}, (-0.08, 1.05)
        title = task["title"]
        panels.append(Panel(curves, "step", "accuracy", title, limits=limits, levels=levels))
    draw_curves(panels, path, title="MAD, baseline settings")


def table(form: Form, results: list[Result]) -> str:
    """Ours at the baseline setting, and the published mean over all settings."""
    rows = []
    for name, task in form["tasks"].items():
        for layer, result in of_task(form, name, results).items():
            right = result.figures["evaluations"][LABEL]["share_right"]
            published = form["published"].get(layer, {})
            theirs = f"{published[name]:.1f} %" if name in published else "-"
            ours = [f"{accuracy(result):.1%}", f"{right:.2%}", f"{result.figures['steps']:,}"]
            rows.append([task["title"], title_of(layer), *ours, theirs])
    head = ["task", "layer", "accuracy", "answers right", "steps", "published mean of all settings"]
    return markdown_table(head, rows)
