"""Training on a labelled task, with a loss at the labels alone, and a trained model's score.

Rows are new ones at every step, or a fixed set in a new order every epoch.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltarule.models import CausalLM, next_token_loss
from deltarule.nn.checks import check_least, check_multiple, check_that
from deltarule.tasks.batch import NO_LABEL, Array, Batch
from deltarule.train.device import to_device, tokens_at_once

# Streams of random numbers count from 0 in training; these keep other rows apart from those, and
# those of the last evaluation apart from those that decide when training ends.
EVALUATION, EXAMPLES, ORDER, TEST = 2**40, 2**41, 2**42, 2**43
# Rows drawn at a time: a generator may need far more memory than its rows do.
CHUNK = 256
# Batches drawn ahead of the one in use, and columns that are read together.
AHEAD, BLOCK = 4, 64
# Rows [B, T], where in them answers are asked for, and the answers: int64 on the CPU.
Read = tuple[Tensor, Tensor, Tensor]


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
        inside = 1 <= self.start <= self.end
        check_that(inside, f"start must lie in 1 to end={self.end}", self.start)


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
        said = f"examples must be None or at least the {self.count} rows of a batch"
        check_that(self.examples is None or self.examples >= self.count, said, self.examples)
        if self.examples is not None and self.curriculum is not None:
            raise ValueError("examples must be None with a curriculum, whose rows change")


# Cells of an experiment follow each other in a process, and share most of these.
@lru_cache(8)
def draw_rows(task: ModuleType, config: Any, *, seed: int, stream: int, rows: int) -> Batch:
    """Rows of a task, a function of the arguments alone, for reading only.

    `stream` says which random numbers, 0 or more; `rows` streams from there on are used up.
    """

    def part(i: int) -> Batch:
        rng = np.random.default_rng((seed, stream + i))
        return task.generate(config, rng, min(CHUNK, rows - i))

    threads = getattr(task, "THREADS", 1)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, threads)) as pool:
        parts = list(pool.map(part, range(0, rows, CHUNK)))
    return type(parts[0])(*map(np.concatenate, zip(*parts, strict=True)))


@lru_cache(2)
def order_of(rows: int, seed: int, epoch: int) -> Array:
    return np.random.default_rng((seed, ORDER + epoch)).permutation(rows)


class DrawnAhead:
    """Draws the next rows in a thread while a GPU is at work; other lengths are let go."""

    def __init__(self, draw: Callable[[int, int | None], Read]) -> None:
        self.draw, self.pool = draw, ThreadPoolExecutor(1)
        self.waiting: dict[tuple[int, int | None], Future[Read]] = {}
        self.length: int | None = None

    def __call__(self, index: int, length: int | None) -> Read:
        # Rows that have just grown may well grow again.
        count, self.length = AHEAD if length == self.length else 1, length
        wanted = [(i, length) for i in range(index, index + count)]
        for other in self.waiting.keys() - set(wanted):
            self.waiting.pop(other).cancel()
        for new in [one for one in wanted if one not in self.waiting]:
            self.waiting[new] = self.pool.submit(self.draw, *new)
        return self.waiting.pop(wanted[0]).result()


class LabelledJob:
    """Batches of a task for `Trainer`, with a short evaluation on rows that training never sees.

    The rows of a step come from `training`, in `accumulate` parts of equal size, those of the
    evaluation from `watched`. With `ahead`, which pays on a GPU, a thread draws them and fills them
    up to few shapes, which a CUDA graph needs.
    """

    batch_tokens = 0

    def __init__(
        self,
        task: ModuleType,
        training: Rows,
        watched: Rows,
        *,
        seed: int,
        accumulate: int = 1,
        ahead: bool = False,
    ) -> None:
        check_multiple("rows", training.count, "accumulate", accumulate)
        self.task, self.training, self.watched, self.seed = task, training, watched, seed
        self.accumulate, self.rows = accumulate, training.count // accumulate
        self.drawn, self.last_loss = 0, torch.tensor(torch.inf)
        self.length = training.curriculum.start if training.curriculum else None
        self.examples: Batch | None = None
        if (count := training.examples) is not None:
            self.examples = draw_rows(task, training.config, seed=seed, stream=EXAMPLES, rows=count)
        self.ahead = ahead
        self.source = DrawnAhead(self.draw) if ahead else self.draw

    def next(self) -> Read:
        """The next rows, a function of the seed and of how many were drawn before."""
        self.grow()
        self.drawn += 1
        rows = self.source(self.drawn, self.length)
        self.batch_tokens = rows[0].numel() * self.accumulate
        return rows

    def draw(self, index: int, length: int | None) -> Read:
        config, steps, longer = self.training.config, self.training.curriculum, 0
        if self.examples is not None:
            # All of them once an epoch, but for what does not fill a batch.
            count = len(self.examples.tokens)
            epoch, place = divmod(index - 1, count // self.rows)
            chosen = order_of(count, self.seed, epoch)[place * self.rows :][: self.rows]
            batch = Batch(self.examples.tokens[chosen], self.examples.labels[chosen])
        else:
            if steps is not None and length is not None:
                config, longer = replace(config, length=length), steps.end - length
            batch = self.task.generate(config, np.random.default_rng((self.seed, index)), self.rows)
        return read_of(batch, longer if self.ahead else None)

    def grow(self) -> None:
        """One token longer if the last rows were learned; a second call does nothing."""
        steps = self.training.curriculum
        if steps is None or self.length is None or self.length == steps.end:
            return
        if self.last_loss.item() < steps.threshold:
            self.length += 1
            self.last_loss.fill_(torch.inf)

    def tensors(self, batch: Read, device: torch.device) -> tuple[Tensor, ...]:
        self.last_loss = self.last_loss.to(device)
        return tuple(to_device(x, device) for x in batch)

    def loss(self, model: CausalLM, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        read, places, answers = tensors
        guesses = logits_at(model, read, places)
        loss = next_token_loss(guesses, answers)
        if self.length is not None:
            # In place: a graph knows where it is.
            self.last_loss.copy_(loss.detach())
        right = (guesses.detach().argmax(-1) == answers).sum()
        return loss, right / (answers != NO_LABEL).sum()

    def shown(self, figures: list[float]) -> dict[str, float]:
        return {"accuracy": figures[0]}

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        """Accuracy on rows that training never sees, the same ones every time."""
        config, count = self.watched.config, self.watched.count
        unseen = draw_rows(self.task, config, seed=self.seed, stream=EVALUATION, rows=count)
        return {"validation_accuracy": measure(model, self.task, config, unseen)["accuracy"]}

    def position(self) -> dict[str, int]:
        self.grow()
        return {"drawn": self.drawn} | ({} if self.length is None else {"length": self.length})

    def seek(self, position: dict[str, int]) -> None:
        self.drawn, self.length = position["drawn"], position.get("length")
        self.last_loss.fill_(torch.inf)


def logits_at(model: CausalLM, read: Tensor, places: Tensor) -> Tensor:
    """What the model says where an answer is asked for: its head is its widest matrix."""
    x, _ = model.hidden(read)
    return model.logits(x.flatten(0, 1).index_select(0, places))


def read_of(batch: Batch, longer: int | None = None) -> Read:
    """What is read of rows, where in it an answer is asked for, and the answers.

    Nothing is carried on from a row: what comes after the last label is not read, but for whole
    blocks, or up to a power of two, so that few lengths occur. With `longer`, so many columns may
    be filled up for that, and places where nothing is asked follow the others, up to such a number.
    """
    tokens, labels, *_ = batch
    asked = np.flatnonzero((labels != NO_LABEL).any(0))
    needed = int(asked[-1]) + 1 if len(asked) else 0
    block = min(BLOCK, 1 << (needed - 1).bit_length())
    end = -(-needed // block) * block
    if longer:
        beyond = (0, 0), (0, longer)
        tokens, labels = np.pad(tokens, beyond), np.pad(labels, beyond, constant_values=NO_LABEL)
    tokens, labels = tokens[:, :end], labels[:, :end].reshape(-1)
    places = np.flatnonzero(labels != NO_LABEL)
    if longer is not None and (missing := (1 << (len(places) - 1).bit_length()) - len(places)):
        places = np.append(places, np.flatnonzero(labels == NO_LABEL)[:missing])
    return torch.from_numpy(tokens), torch.from_numpy(places), torch.from_numpy(labels[places])


def guesses_of(model: CausalLM, batch: Batch) -> Array:
    """The likeliest token at each labelled position, NO_LABEL elsewhere."""
    guesses, device = np.full(batch.labels.shape, NO_LABEL, np.int64), model.embedding.weight.device
    rows = max(1, tokens_at_once(device) // batch.tokens.shape[1])
    for first in range(0, len(guesses), rows):
        part = Batch(batch.tokens[first : first + rows], batch.labels[first : first + rows])
        read, places, _ = (to_device(x, device) for x in read_of(part))
        logits = logits_at(model, read, places)
        guesses[first : first + rows][part.labels != NO_LABEL] = logits.argmax(-1).cpu().numpy()
    return guesses


def measure(
    model: CausalLM, task: ModuleType, config: Any, batch: Batch, prefixes: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Score a model on rows of a task; the model is as within `evaluating`.

    `accuracy` is the share of right labels; `sequence_accuracy` that of rows with every label
    right; `prefixes`, a list of [n, share], that of rows whose first n labels are. The task's own
    `measure`, if any, adds to these figures or replaces them.
    """
    guesses = guesses_of(model, batch)
    asked = batch.labels != NO_LABEL
    wrong = asked & (guesses != batch.labels)
    figures: dict[str, Any] = {
        "accuracy": 1 - float(wrong.sum() / asked.sum()),
        "sequence_accuracy": float((~wrong.any(1)).mean()),
    }
    if prefixes:
        # Labels before a row's first mistake.
        right = (asked & (wrong.cumsum(1) == 0)).sum(1)
        figures["prefixes"] = [[n, float((right >= n).mean())] for n in prefixes]
    if hasattr(task, "measure"):
        figures |= task.measure(config, batch, guesses)
    return figures
