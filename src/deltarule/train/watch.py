"""What is watched of a run: the best of its evaluations; other programs that draw figures."""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltarule.nn.checks import check_least
from deltarule.train.extra import require
from deltarule.train.metrics import Row, Sink


@dataclass(frozen=True)
class WatchOptions:
    """When to end early, and where to send metrics."""

    patience: int = 0
    """End after so many short evaluations in a row that were no better than the best, and take the
    model of the best; 0 does neither."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Send metrics to these, too; each is an extra of its name."""

    def __post_init__(self) -> None:
        check_least(self, 0, "patience")


@dataclass(frozen=True)
class Best:
    """The best short evaluation so far, and how many came after it."""

    step: int = 0
    value: float | None = None
    waited: int = 0

    def after(self, step: int, measured: dict[str, float]) -> "Best":
        """Take one more evaluation: lower is better, but for an accuracy."""
        name, value = next(iter(measured.items()))
        value = -value if name.endswith("accuracy") else value
        if math.isfinite(value) and (self.value is None or value < self.value):
            return Best(step, value)
        return Best(self.step, self.value, self.waited + 1)


@contextlib.contextmanager
def sinks(log: tuple[str, ...], folder: Path, *, first: bool) -> Iterator[list[Sink]]:
    """Where the first process of a run sends metrics beside their file; closed in the end."""
    with contextlib.ExitStack() as opened:
        makers = {"tensorboard": tensorboard, "wandb": wandb}
        yield [opened.enter_context(makers[name](folder)) for name in log] if first else []


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Sink]:
    """`tensorboard --logdir runs` shows them."""
    require("tensorboard", "tensorboard")
    writer = require("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(row: Row) -> None:
        for name, value in figures(row).items():
            writer.add_scalar(name, value, row["step"])

    with contextlib.closing(writer):
        yield write


@contextlib.contextmanager
def wandb(folder: Path) -> Iterator[Sink]:
    """A run of Weights & Biases, the same one when this run goes on."""
    name = hashlib.sha256(str(folder.absolute()).encode(errors="replace")).hexdigest()[:16]
    run = require("wandb", "wandb").init(
        project="deltarule", name=folder.name, id=name, resume="allow", dir=str(folder)
    )
    try:
        yield lambda row: run.log(figures(row), step=row["step"])
    finally:
        run.finish()


def figures(row: Row) -> dict[str, float]:
    return {n: x for n, x in row.items() if n != "step" and isinstance(x, int | float)}
