"""Rows of text of one length: drawn anywhere for training, side by side in held-out documents."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.models import CausalLM
from deltarule.models.loss import next_token_loss
from deltarule.train.data import Array, Corpus
from deltarule.train.device import to_device
from deltarule.train.documents import DataError
from deltarule.train.evaluate import bin_edges
from deltarule.train.loop import LoopOptions

# Tokens in a forward pass of an evaluation, unless one row is longer.
EVALUATED_TOKENS = 16_384


class Rows(NamedTuple):
    """`targets[r, t]` is the byte after `tokens[r, t]`; both int64 [rows, length]."""

    tokens: Tensor
    targets: Tensor


def rows_at(corpus: Corpus, starts: Array, length: int) -> Rows:
    """The rows that start at these tokens."""
    rows = [corpus.tokens[start : start + length + 1] for start in starts.tolist()]
    tokens = torch.from_numpy(np.stack(rows).astype(int))
    return Rows(tokens[:, :-1], tokens[:, 1:])


def held_out_rows(corpus: Corpus, length: int, most_bytes: int) -> Rows:
    """Rows side by side, each within one document, spread evenly over the text.

    They have at most so many bytes together, but there is one at least; where no document is long
    enough, a `DataError` says so.
    """
    spans = zip(corpus.bounds[:-1].tolist(), corpus.bounds[1:].tolist(), strict=True)
    starts = [start for first, last in spans for start in range(first, last - length, length)]
    if not starts:
        raise DataError(
            f"no held-out document has the {length:,} bytes of a row: give --data with longer ones"
        )
    count = min(len(starts), max(1, most_bytes // length))
    chosen = np.array(starts)[np.arange(count) * len(starts) // count]
    return rows_at(corpus, chosen, length)


class TextRows:
    """What a model trains on: rows that start anywhere, and the cross entropy of the next byte."""

    static = True

    def __init__(
        self, rows: int, length: int, training: Corpus, watched: Rows, loop: LoopOptions
    ) -> None:
        """Start at the first rows of the seed; each step's come in `accumulate` parts."""
        self.batch_tokens = rows * length
        self.training, self.watched, self.loop = training, watched, loop
        self.rows, self.length = rows // loop.accumulate, length
        self.places = len(training.tokens) - length
        if self.places < 1:
            raise DataError(
                f"the text to train on has {len(training.tokens):,} tokens, fewer than one row of "
                f"{length:,} and its last target: give --data with more"
            )
        self.drawn = 0

    def next(self) -> Rows:
        """The next rows, a function of the seed and of how many were drawn before."""
        self.drawn += 1
        starts = np.random.default_rng((self.loop.seed, self.drawn)).integers(
            self.places, size=self.rows
        )
        return rows_at(self.training, starts, self.length)

    def tensors(self, rows: Rows, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(to_device(x, device) for x in rows)

    def loss(self, model: CausalLM, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Mean nats a byte, and the same for display."""
        tokens, targets = tensors
        x, _ = model.hidden(tokens)
        loss = next_token_loss(model.logits(x), targets)
        return loss, loss

    def shown(self, figures: list[float]) -> dict[str, float]:
        return {"bits/byte": figures[0] / math.log(2)}

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        measured = measure(model, self.watched, dtype=self.loop.dtype)
        return {"held_out_bits_per_byte": measured["bits_per_byte"]}

    def position(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def seek(self, position: dict[str, int]) -> None:
        self.drawn = position["drawn"]


@torch.no_grad()
def measure(model: CausalLM, rows: Rows, *, dtype: str = "float32") -> dict[str, Any]:
    """Bits per byte of rows, each read from an empty state, under autocast if in "bfloat16".

    Also their standard_error over the rows (None for a single one); how many rows; and positions:
    [first, last, bits per byte] of the bytes at those places of their rows, from 1.
    """
    device, length = model.embedding.weight.device, rows.tokens.shape[1]
    step = max(1, EVALUATED_TOKENS // length)
    parts = []
    for tokens, targets in zip(rows.tokens.split(step), rows.targets.split(step), strict=True):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            logits, _ = model(tokens.to(device))
        nats = F.cross_entropy(logits.float().mT, targets.to(device), reduction="none")
        parts.append(nats.cpu().double() / math.log(2))
    bits = torch.cat(parts)
    count, means = len(bits), bits.mean(1)
    return {
        "bits_per_byte": bits.mean().item(),
        "standard_error": means.std().item() / math.sqrt(count) if count > 1 else None,
        "rows": count,
        "positions": [
            [first, last, bits[:, first - 1 : last].mean().item()]
            for first, last in bin_edges(length)
        ],
    }
