"""Rows of a labelled task: new ones at every step, or a fixed set in a new order every epoch."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from deltarule.nn.checks import check_least
from deltarule.tasks.batch import Batch

# Streams of random numbers count from 0 in training; these keep other rows apart from those, and
# those of the last evaluation apart from those that decide when training ends.
EVALUATION, EXAMPLES, ORDER, TEST = 2**40, 2**41, 2**42, 2**43
# Rows drawn at a time: a generator may need far more memory than its rows do.
CHUNK = 256
# Batches drawn ahead of the one in use.
AHEAD = 4

Draw = Callable[[int], Batch]


@dataclass(frozen=True)
class Curriculum:
    """Rows grow longer as they are learned: the training configuration's `length` is replaced."""

    start: int
    """The first length."""
    end: int
    """The last length."""
    threshold: float
    """One token longer after every step whose loss is below this, in nats a label."""

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.end:
            raise ValueError(f"start must lie in 1 to end={self.end}, got {self.start}")


@dataclass(frozen=True)
class Rows:
    """Rows of a task, and whether they are new at every step."""

    config: Any
    """The task's configuration."""
    count: int
    """How many: of a batch in training, all of them in an evaluation."""
    examples: int | None = None
    """A fixed set of this many, in a new order every epoch; None draws new rows for ever."""
    curriculum: Curriculum | None = None
    """None keeps the configuration's length."""

    def __post_init__(self) -> None:
        check_least(self, 1, "count")
        if self.examples is not None and self.examples < self.count:
            raise ValueError(
                f"examples must be None or at least the {self.count} rows of a batch, "
                f"got {self.examples}"
            )
        if self.examples is not None and self.curriculum is not None:
            raise ValueError("examples must be None with a curriculum: its rows change as it goes")


def draw_rows(task: ModuleType, config: Any, *, seed: int, stream: int, rows: int) -> Batch:
    """Rows of a task, a function of the arguments alone.

    `stream` says which random numbers, 0 or more; `rows` streams from there on are used up.
    """
    parts = [
        task.generate(config, np.random.default_rng((seed, stream + i)), min(CHUNK, rows - i))
        for i in range(0, rows, CHUNK)
    ]
    return type(parts[0])(*map(np.concatenate, zip(*parts, strict=True)))


class Revisited:
    """A fixed set of rows, all of them once an epoch, but for what does not fill a batch."""

    def __init__(self, examples: Batch, *, count: int, seed: int) -> None:
        self.examples, self.count, self.seed = examples, count, seed
        self.batches = len(examples.tokens) // count
        self.epoch, self.order = -1, np.zeros(0, np.int64)

    def __call__(self, index: int) -> Batch:
        epoch, place = divmod(index - 1, self.batches)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, ORDER + epoch))
            self.epoch, self.order = epoch, rng.permutation(len(self.examples.tokens))
        chosen = self.order[place * self.count : (place + 1) * self.count]
        return type(self.examples)(*(part[chosen] for part in self.examples))


class DrawnAhead:
    """Draws the next batches in a thread while a GPU is at work on one."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.pool = draw, ThreadPoolExecutor(1)
        self.waiting: dict[int, Future[Batch]] = {}

    def __call__(self, index: int) -> Batch:
        for i in range(index, index + AHEAD):
            if i not in self.waiting:
                self.waiting[i] = self.pool.submit(self.draw, i)
        return self.waiting.pop(index).result()
