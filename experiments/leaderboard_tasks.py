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
from experiments.settings import Form, read_settings
from experiments.task_cell import Evaluation, TaskCell
from experiments.text_cell import TextCell
from experiments.text_setting import text_cells, text_model
from experiments.words import Scale


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


def labelled(form: Form) -> Column:

    def cell(system: str) -> TaskCell:
        steps, config = form["steps"], load_task(form["task"]).Config
        training, tested = config(**form["training"]), config(**form["tested"])
        model = {"vocab_size": training.vocab_size, "layer_types": system, "tie_embeddings": False}
        dtype = form.get("dtype", "float32")
        every = steps // 6
        return TaskCell(
            name=system,
            task=form["task"],
            training=training,
            evaluations=(Evaluation("new rows", tested, 1000),),
            model=ModelConfig(**model | form["model"]),
            rows=form["rows"],
            optimizer=OptimizerOptions(min_lr_ratio=0.05, warmup_steps=steps // 10, beta2=0.98),
            loop=LoopOptions(
                steps=steps, dtype=dtype, evaluate_every=every, save_every=steps, keep=1
            ),
            stop_at=0.999,
        )

    rates, seeds = tuple(form["rates"]), tuple(form["seeds"])
    return Column(form["title"], form["setting"], cell, rates, seeds)


# Of a MAD task.
STEPS, RATE = 800, 2e-3


def of_mad(name: str, one: mad.Setting) -> Column:
    steps = min(one.steps, STEPS)
    setting = f"MAD's baseline, {steps:,} steps of 128 rows; 2 layers of width 128"
    return Column(one.title, setting, partial(mad_cell, name, steps), (RATE,), (0,))


def mad_cell(name: str, steps: int, system: str) -> TaskCell:
    """The model and the rows of the experiment `mad`, for fewer steps and with warm-up.

    Convolution and sizes of heads are the system's own.
    """
    base = mad.make_cell("gpu", name, system)
    model = replace(base.model, conv_size=None, head_k_dim=None, head_v_dim=None)
    optimizer = replace(base.optimizer, warmup_steps=steps // 10, beta2=0.98, clip=1.0)
    loop = replace(base.loop, steps=steps, evaluate_every=steps // 5, save_every=steps)
    return replace(base, model=model, optimizer=optimizer, loop=loop)


def text(system: str) -> TextCell:
    return text_cells({system: text_model(system, "large")}, "large", (0,))[0]


COLUMNS: dict[Scale, dict[str, Column]] = {
    scale: {key: labelled(column) for key, column in form.items()}
    for scale, form in read_settings("leaderboard").items()
}
COLUMNS["gpu"] = {
    **{f"mad-{name}": of_mad(name, one) for name, one in mad.SETTINGS["gpu"].items()},
    **COLUMNS["gpu"],
    "language": Column(
        "Text, bits per byte",
        "30 M parameters, 600 steps of 32 rows of 512 bytes; 8 layers",
        text,
        rates=(1e-3, 4e-3),
        seeds=(0,),
    ),
}
