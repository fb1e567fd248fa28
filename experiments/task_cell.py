"""A cell that trains one small model on one task and measures it on rows it never saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn.gates import starting_horizons
from deltarule.tasks import load_task
from deltarule.train.labelled import LabelledJob, measure
from deltarule.train.loop import LoopOptions, Trainer, evaluating
from deltarule.train.metrics import Row, read_metrics
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.random_state import seed_everything
from deltarule.train.task_rows import TEST, Curriculum, Rows, draw_rows
from experiments.experiment import SAVE_SECONDS, Result
from experiments.figures import Curve
from experiments.words import Form


@dataclass(frozen=True)
class Evaluation:
    """New rows of a task to measure on."""

    label: str
    """Its key in the figures, such as "length 256"."""
    config: Any
    """The task's configuration."""
    rows: int
    """How many."""
    prefixes: tuple[int, ...] = ()
    """Also the share of rows whose first n labels are all right, for each n."""


@dataclass(frozen=True, kw_only=True)
class TaskCell:
    """One small model on one task."""

    name: str
    task: str
    """Key in `deltarule.tasks.TASKS`."""
    training: Any
    """The task's configuration in training."""
    evaluations: tuple[Evaluation, ...]
    """The first one is also watched during training."""
    model: ModelConfig
    """Its vocab_size is at least the task's."""
    rows: int
    """Rows in each step."""
    optimizer: OptimizerOptions
    """Rates, decay and clipping."""
    loop: LoopOptions
    """Steps, seed and dtype; its device is the experiment's."""
    stop_at: float | None = None
    """End training once the watched accuracy is this high; None never ends it early."""
    watched_rows: int = 256
    """Rows of the first evaluation's kind, measured every `loop.evaluate_every` steps."""
    curriculum: Curriculum | None = None
    """None trains on one length."""
    examples: int | None = None
    """A fixed set of this many rows, in a new order every epoch; None draws new rows for ever."""

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise ValueError("evaluations must hold one or more, got none")
        self.training_rows()

    def training_rows(self) -> Rows:
        return Rows(self.training, self.rows, self.examples, self.curriculum)

    def rows_of(self) -> ModuleType:
        """The module that draws the task's rows."""
        return load_task(self.task)

    def build(self) -> CausalLM:
        """The model, its weights drawn from the global random state; a subclass may add to it."""
        return CausalLM(self.model)

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Train, or go on from the newest checkpoint, and measure.

        `evaluations`: for each label what `train.labelled.measure` returns; `curve`: [step,
        training loss, watched accuracy] of every short evaluation, the loss a mean over the steps
        since the one before; `horizons`: in tokens, that each head of each gated layer started
        with; `steps`, `stopped_early`, `parameters`, `training_seconds`.
        """
        task = self.rows_of()
        seed_everything(self.loop.seed)
        model = self.build()
        horizons = starting_horizons(model)
        job = LabelledJob(
            task, self.training_rows(), Rows(self.evaluations[0].config, self.watched_rows),
            seed=self.loop.seed, accumulate=self.loop.accumulate, ahead=device.type == "cuda",
        )  # fmt: skip
        trainer = Trainer(
            model, job, options=replace(self.loop, device=str(device)),
            optimizer_options=self.optimizer, folder=folder, resume=True,
            stop_when=self.good_enough, save_seconds=SAVE_SECONDS,
        )  # fmt: skip
        trainer.run()
        return {
            "evaluations": {one.label: self.evaluate(model, one) for one in self.evaluations},
            "curve": curve(read_metrics(folder / "metrics.jsonl")),
            "horizons": horizons,
            "steps": trainer.step,
            "stopped_early": trainer.step < self.loop.steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "training_seconds": round(trainer.seconds, 1),
        }

    def good_enough(self, measured: dict[str, float]) -> bool:
        return self.stop_at is not None and measured["validation_accuracy"] >= self.stop_at

    def evaluate(self, model: CausalLM, evaluation: Evaluation) -> dict[str, Any]:
        task = self.rows_of()
        rows = draw_rows(
            task, evaluation.config, seed=self.loop.seed, stream=TEST, rows=evaluation.rows
        )
        with evaluating(model):
            return measure(model, task, evaluation.config, rows, evaluation.prefixes)


def accuracy(result: Result) -> float:
    """Accuracy of the first evaluation of a cell that did not fail."""
    first: dict[str, Any] = next(iter(result.figures["evaluations"].values()))
    return float(first["accuracy"])


AnyTaskCell = TypeVar("AnyTaskCell", bound=TaskCell)


def task_cell(
    form: Form,
    name: str,
    training: Any,
    evaluations: Sequence[Evaluation],
    *,
    seed: int = 0,
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    loop: Mapping[str, Any] | None = None,
    cell: Mapping[str, Any] | None = None,
    kind: type[AnyTaskCell],
) -> AnyTaskCell:
    """A cell of one form of an experiment; the last arguments add to what the form says."""
    words = {"vocab_size": training.vocab_size}
    return kind(
        name=name,
        training=training,
        evaluations=tuple(evaluations),
        model=ModelConfig(**words | form["model"] | dict(model or {})),
        optimizer=OptimizerOptions(**form["optimizer"] | dict(optimizer or {})),
        loop=LoopOptions(**form["loop"] | dict(loop or {}), seed=seed),
        **form["cell"] | dict(cell or {}),
    )


def in_training(label: str, result: Result) -> Curve:
    """What a cell watched, step by step: the accuracy, or bits per byte of text.

    Examples:
        >>> result = Result("a", {}, {"curve": [[100, 2.5, 0.25], [200, 1.5, 0.75]]})
        >>> in_training("deltanet", result).y
        [0.25, 0.75]
    """
    points = result.figures["curve"]
    return Curve(label, [step for step, *_ in points], [seen for *_, seen in points])


def curve(rows: list[Row]) -> list[list[float]]:
    """[step, mean training loss since the point before, watched accuracy] of each evaluation.

    Examples:
        >>> curve([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0},
        ...        {"step": 2, "validation_accuracy": 0.5}])
        [[2, 1.5, 0.5]]
    """
    points, losses = [], []
    for row in rows:
        if "loss" in row:
            losses.append(row["loss"])
        elif "validation_accuracy" in row and losses:
            mean = sum(losses) / len(losses)
            points.append([row["step"], round(mean, 5), round(row["validation_accuracy"], 5)])
            losses = []
    return points
