"""Training on a labelled task, with a loss at the labels alone, and a trained model's score."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltarule.models import CausalLM, next_token_loss
from deltarule.nn.checks import check_multiple
from deltarule.tasks.batch import NO_LABEL, Array, Batch
from deltarule.train import task_rows
from deltarule.train.device import to_device

# Tokens that a model reads at a time when it is measured.
READ = 2**15
BLOCK = 64


class LabelledJob:
    """Batches of a task for `Trainer`, with a short evaluation on rows that training never sees.

    The rows of a step come from `training`, in `accumulate` parts of equal size, those of the
    evaluation from `watched`. With `ahead` a thread draws batches, which pays on a GPU.
    """

    batch_tokens = 0

    def __init__(
        self,
        task: ModuleType,
        training: task_rows.Rows,
        watched: task_rows.Rows,
        *,
        seed: int,
        accumulate: int = 1,
        ahead: bool = False,
    ) -> None:
        check_multiple("rows", training.count, "accumulate", accumulate)
        # A curriculum reads the last loss, and changes the lengths.
        self.static = training.curriculum is None
        self.task, self.training, self.watched, self.seed = task, training, watched, seed
        self.accumulate, self.rows = accumulate, training.count // accumulate
        self.drawn, self.last_loss = 0, torch.tensor(torch.inf)
        self.length = training.curriculum.start if training.curriculum else None
        source: task_rows.Draw = self.draw_new
        if training.examples is not None:
            examples = task_rows.draw_rows(
                task, training.config, seed=seed, stream=task_rows.EXAMPLES, rows=training.examples
            )
            source = task_rows.Revisited(examples, count=self.rows, seed=seed)
        # The length of the next rows is not known ahead of the loss.
        self.source = task_rows.DrawnAhead(source) if ahead and self.length is None else source
        self.unseen: Batch | None = None

    def next(self) -> Batch:
        """The next rows, a function of the seed and of how many were drawn before."""
        self.grow()
        self.drawn += 1
        batch = self.source(self.drawn)
        self.batch_tokens = batch.tokens.size * self.accumulate
        return batch

    def draw_new(self, index: int) -> Batch:
        return self.draw(index, self.rows)

    def draw(self, stream: int, rows: int) -> Batch:
        config = self.training.config
        if self.length is not None:
            config = replace(config, length=self.length)
        return self.task.generate(config, np.random.default_rng((self.seed, stream)), rows)

    def grow(self) -> None:
        """One token longer if the last rows were learned; a second call does nothing."""
        steps = self.training.curriculum
        if steps is None or self.length is None or not self.last_loss.item() < steps.threshold:
            return
        self.length = min(self.length + 1, steps.end)
        self.last_loss = torch.tensor(torch.inf)

    def tensors(self, batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
        return read_of(batch, device)

    def loss(self, model: CausalLM, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        read, places, answers = tensors
        guesses = logits_at(model, read, places)
        loss = next_token_loss(guesses, answers)
        self.last_loss = loss.detach()
        return loss, (guesses.detach().argmax(-1) == answers).float().mean()

    def shown(self, figures: list[float]) -> dict[str, float]:
        return {"accuracy": figures[0]}

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        """Accuracy on rows that training never sees, the same ones every time."""
        if self.unseen is None:
            self.unseen = task_rows.draw_rows(
                self.task, self.watched.config, seed=self.seed, stream=task_rows.EVALUATION,
                rows=self.watched.count,
            )  # fmt: skip
        figures = measure(model, self.task, self.watched.config, self.unseen)
        return {"validation_accuracy": figures["accuracy"]}

    def position(self) -> dict[str, int]:
        self.grow()
        return {"drawn": self.drawn} | ({} if self.length is None else {"length": self.length})

    def seek(self, position: dict[str, int]) -> None:
        self.drawn = position["drawn"]
        self.length = position.get("length")
        self.last_loss = torch.tensor(torch.inf)


def logits_at(model: CausalLM, read: Tensor, places: Tensor) -> Tensor:
    """What the model says where an answer is asked for.

    The head is the widest matrix of a small model, and most positions ask for nothing.
    """
    x, _ = model.hidden(read)
    return model.logits(x.flatten(0, 1)[places])


def read_of(batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
    """What is read of the rows [B, T], where in it an answer is asked for, and the answers.

    Nothing is carried on from a row, so what comes after the last label need not be read.
    """
    tokens, labels, *_ = batch
    end = read_length(labels)
    tokens, labels = tokens[:, :end], labels[:, :end]
    places = np.flatnonzero(labels != NO_LABEL)
    found = tokens, places, labels.reshape(-1)[places]
    return tuple(to_device(torch.from_numpy(x), device) for x in found)


def read_length(labels: Array) -> int:
    """Columns up to the last label, in whole blocks so that few different lengths occur.

    Examples:
        >>> labels = np.full((1, 200), NO_LABEL)
        >>> labels[0, 70] = 1
        >>> read_length(labels)
        128
    """
    asked = np.flatnonzero((labels != NO_LABEL).any(0))
    last = int(asked[-1]) + 1 if len(asked) else 0
    return min(labels.shape[1], -(-last // BLOCK) * BLOCK)


def guesses_of(model: CausalLM, batch: Batch) -> Array:
    """The likeliest token at each labelled position, NO_LABEL elsewhere."""
    guesses = np.full(batch.labels.shape, NO_LABEL, np.int64)
    rows = max(1, READ // batch.tokens.shape[1])
    for first in range(0, len(guesses), rows):
        part = Batch(batch.tokens[first : first + rows], batch.labels[first : first + rows])
        read, places, _ = read_of(part, model.embedding.weight.device)
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
