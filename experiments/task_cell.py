"""Cells that train one small model and measure it on rows it never saw; those on labelled tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn.gates import starting_horizons
from deltarule.tasks import load_task
from deltarule.train.checkpoint import seed_everything
from deltarule.train.job import Job
from deltarule.train.labelled import TEST, Curriculum, LabelledJob, Rows, draw_rows, measure
from deltarule.train.loop import LoopOptions, Trainer, evaluating
from deltarule.train.metrics import Row, read_metrics
from deltarule.train.optimizer import OptimizerOptions
from experiments.experiment import Form

# Seconds of training that a kill may cost a cell.
SAVE_SECONDS = 30.0
Figures = dict[str, Any]


class Lessons(NamedTuple):
    """What a model trains on, how it is measured, by label, and what else a run tells."""

    job: Job
    measures: Mapping[str, Callable[[CausalLM], Figures]]
    told: Callable[[Trainer], Figures]


@dataclass(frozen=True, kw_only=True)
class TrainedCell:
    """One small model: its sizes, the rows in each step, and how it is trained.

    The device of `loop` is the experiment's.
    """

    name: str
    model: ModelConfig
    rows: int
    optimizer: OptimizerOptions
    loop: LoopOptions

    def lessons(self, ahead: bool) -> Lessons:
        """With `ahead`, rows are drawn while a GPU is at work on others."""
        raise NotImplementedError

    def build(self) -> CausalLM:
        """The model, its weights drawn from the global random state; a subclass may add to it."""
        return CausalLM(self.model)

    def good_enough(self, measured: dict[str, float]) -> bool:
        return False

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Train, or go on from the newest checkpoint, and measure.

        `evaluations` by label; `curve`: [step, training loss of a task, what is watched] of every
        short evaluation, the loss a mean over the steps since the one before; `horizons`: in
        tokens, that each head of each gated layer started with; `steps`, `parameters`,
        `training_seconds`.
        """
        lessons = self.lessons(device.type == "cuda")
        seed_everything(self.loop.seed)
        model = self.build()
        horizons = starting_horizons(model)
        trainer = Trainer(
            model, lessons.job, options=replace(self.loop, device=str(device)),
            optimizer_options=self.optimizer, folder=folder, resume=True,
            stop_when=self.good_enough, save_seconds=SAVE_SECONDS,
        )  # fmt: skip
        trainer.run()
        with evaluating(model):
            evaluations = {label: measured(model) for label, measured in lessons.measures.items()}
        return {
            "evaluations": evaluations, "curve": curve(read_metrics(folder / "metrics.jsonl")),
            "horizons": horizons, "steps": trainer.step,
            "parameters": sum(p.numel() for p in model.parameters()),
            "training_seconds": round(trainer.seconds, 1), **lessons.told(trainer),
        }  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """New rows of a task to measure on, under the label "length 256" or the like.

    With `prefixes` also the share of rows whose first n labels are all right, for each n.
    """

    label: str
    config: Any
    rows: int
    prefixes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskCell(TrainedCell):
    """One small model on one task, whose configuration in training is `training`."""

    task: str
    """Key in `deltarule.tasks.TASKS`."""
    training: Any
    evaluations: tuple[Evaluation, ...]
    """The first one is also watched during training."""
    stop_at: float | None = None
    """End training once the watched accuracy is this high; None never ends it early."""
    watched_rows: int = 256
    """Rows of the first evaluation's kind, measured every `loop.evaluate_every` steps."""
    curriculum: Curriculum | None = None
    """None trains on one length."""
    examples: int | None = None
    """A fixed set of this many rows, in a new order every epoch; None draws new rows for ever."""

    def rows_of(self) -> ModuleType:
        return load_task(self.task)

    def lessons(self, ahead: bool) -> Lessons:
        watched = Rows(self.evaluations[0].config, self.watched_rows)
        rows = Rows(self.training, self.rows, self.examples, self.curriculum)
        job = LabelledJob(
            self.rows_of(), rows, watched,
            seed=self.loop.seed, accumulate=self.loop.accumulate, ahead=ahead,
        )  # fmt: skip
        measures = {one.label: partial(self.measure, one) for one in self.evaluations}
        return Lessons(job, measures, lambda run: {"stopped_early": run.step < self.loop.steps})

    def measure(self, one: Evaluation, model: CausalLM) -> Figures:
        task = self.rows_of()
        rows = draw_rows(task, one.config, seed=self.loop.seed, stream=TEST, rows=one.rows)
        return measure(model, task, one.config, rows, one.prefixes)

    def good_enough(self, measured: dict[str, float]) -> bool:
        return self.stop_at is not None and measured["validation_accuracy"] >= self.stop_at


AnyTaskCell = TypeVar("AnyTaskCell", bound=TaskCell)


def task_cell(
    kind: type[AnyTaskCell],
    form: Form,
    name: str,
    training: Any,
    evaluations: Sequence[Evaluation],
    *,
    seed: int = 0,
    model: Form | None = None,
    optimizer: Form | None = None,
    loop: Form | None = None,
    cell: Form | None = None,
) -> AnyTaskCell:
    """A cell of one form of an experiment; the last arguments add to what the form says."""
    words = {"vocab_size": training.vocab_size}
    return kind(
        name=name, training=training, evaluations=tuple(evaluations),
        model=ModelConfig(**words | form["model"] | (model or {})),
        optimizer=OptimizerOptions(**form["optimizer"] | (optimizer or {})),
        loop=LoopOptions(**form["loop"] | (loop or {}), seed=seed),
        **form["cell"] | (cell or {}),
    )  # fmt: skip


def curve(rows: list[Row]) -> list[list[float]]:
    """[step, mean training loss since the point before, watched accuracy] of each evaluation.

    Of text [step, held-out bits per byte].

    Examples:
        >>> curve([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0},
        ...        {"step": 2, "validation_accuracy": 0.5}])
        [[2, 1.5, 0.5]]
    """
    points, losses = [], []
    for row in rows:
        if "loss" in row:
            losses.append(row["loss"])
        elif "held_out_bits_per_byte" in row:
            points.append([row["step"], row["held_out_bits_per_byte"]])
        elif "validation_accuracy" in row and losses:
            mean = sum(losses) / len(losses)
            points.append([row["step"], round(mean, 5), round(row["validation_accuracy"], 5)])
            losses = []
    return points
