"""The tasks of the leaderboard, each at one setting for every system."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from deltarule.models import ModelConfig
from deltarule.tasks import load_task
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments import mad
from experiments.task_cell import Evaluation, TaskCell
from experiments.text_cell import TextCell
from experiments.text_setting import text_cells, text_model
from experiments.words import Form, read_settings


class Column(NamedTuple):
    """A task at one setting."""

    title: str
    setting: str
    """What a model trains on and is tested on, for a reader."""
    cell: Callable[[str], TaskCell | TextCell]
    """From a system to its training run at the first rate and seed."""
    rates: tuple[float, ...]
    """Tried with the first seed."""
    seeds: tuple[int, ...]
    """The first one, and those that the best rate runs with as well."""


Columns = dict[str, Column]


def columns(form: Form) -> Columns:
    """The tasks of the settings, between MAD's and text where those are asked for."""
    base = read_settings("mad")["gpu"] if "mad" in form else {"tasks": {}}
    of_mad = {
        f"mad-{name}": mad_column(base, name, form["mad"] | base["each"] | task)
        for name, task in base["tasks"].items()
    }
    labelled = {
        key: column(one, partial(labelled_cell, one)) for key, one in form["columns"].items()
    }
    text = {"language": column(form["text"], text_cell)} if "text" in form else {}
    return of_mad | labelled | text


def column(form: Form, cell: Callable[[str], TaskCell | TextCell]) -> Column:
    return Column(form["title"], form["setting"], cell, tuple(form["rates"]), tuple(form["seeds"]))


def labelled_cell(form: Form, system: str) -> TaskCell:
    steps, config = form["steps"], load_task(form["task"]).Config
    training, tested = config(**form["training"]), config(**form["tested"])
    model = {"vocab_size": training.vocab_size, "layer_types": system, "tie_embeddings": False}
    return TaskCell(
        name=system,
        task=form["task"],
        training=training,
        evaluations=(Evaluation("new rows", tested, 1000),),
        model=ModelConfig(**model | form["model"]),
        rows=form["rows"],
        optimizer=OptimizerOptions(min_lr_ratio=0.05, warmup_steps=steps // 10, beta2=0.98),
        loop=LoopOptions(
            steps=steps,
            dtype=form.get("dtype", "float32"),
            evaluate_every=steps // 6,
            save_every=steps,
            keep=1,
        ),
        stop_at=0.999,
    )


def mad_column(base: Form, name: str, form: Form) -> Column:
    steps = min(form["steps"], form["most_steps"])
    setting = f"MAD's baseline, {steps:,} steps of 128 rows; 2 layers of width 128"
    return column(form | {"setting": setting}, partial(mad_cell, base, name, steps))


def mad_cell(base: Form, name: str, steps: int, system: str) -> TaskCell:
    """The model and the rows of the experiment `mad`, for fewer steps and with warm-up.

    Convolution and sizes of heads are the system's own.
    """
    cell = mad.make_cell(base, name, system)
    return replace(
        cell,
        model=replace(cell.model, conv_size=None, head_k_dim=None, head_v_dim=None),
        optimizer=replace(cell.optimizer, warmup_steps=steps // 10, beta2=0.98, clip=1.0),
        loop=replace(cell.loop, steps=steps, evaluate_every=steps // 5, save_every=steps),
    )


def text_cell(system: str) -> TextCell:
    return text_cells({system: text_model(system, "large")}, "large", (0,))[0]
