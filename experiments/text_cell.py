"""Cells that train one small language model of bytes on text, and measure it by position.

Their sizes, tokens and rates stand in `settings/text.toml`. Models have the same number of
parameters: what a mixer leaves over goes into the MLP.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.models import CausalLM, ModelConfig, count_parameters, next_token_loss
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.nn import MIXERS
from deltarule.tasks.batch import Batch
from deltarule.train.data import Array, Corpus, encode_documents
from deltarule.train.device import to_device, tokens_at_once
from deltarule.train.documents import DataError, read_documents, split_documents
from deltarule.train.evaluate import bin_edges
from deltarule.train.labelled import LabelledJob, Rows
from deltarule.train.loop import LoopOptions, Trainer
from deltarule.train.optimizer import OptimizerOptions
from experiments.experiment import Result, read_settings
from experiments.pinned import read_pinned_text
from experiments.seeds import first_evaluation
from experiments.task_cell import Figures, Lessons, TrainedCell

# Tensor cores take matrices whose sides are multiples of this.
MULTIPLE = 8
SIZES = read_settings("text")


def rows_at(corpus: Corpus, starts: Array, length: int) -> Batch:
    """The answer to each byte is the one after it."""
    rows = np.stack([corpus.tokens[x : x + length + 1] for x in starts.tolist()]).astype(int)
    return Batch(rows[:, :-1], rows[:, 1:])


def held_out_rows(corpus: Corpus, length: int, most_bytes: int) -> Batch:
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
    return rows_at(corpus, np.array(starts)[np.arange(count) * len(starts) // count], length)


class TextJob(LabelledJob):
    """Rows that start anywhere in a text, every byte asked for, and watched in bits per byte."""

    def __init__(
        self, rows: int, length: int, training: Corpus, watched: Batch, loop: LoopOptions
    ) -> None:
        places = len(training.tokens) - length
        if places < 1:
            raise DataError(
                f"the text to train on has {len(training.tokens):,} tokens, fewer than one row of "
                f"{length:,} and its last target: give --data with more"
            )

        def generate(config: None, rng: np.random.Generator, count: int) -> Batch:
            return rows_at(training, rng.integers(places, size=count), length)

        text: Any = SimpleNamespace(generate=generate)
        of_text = Rows(None, rows)
        super().__init__(text, of_text, of_text, seed=loop.seed, accumulate=loop.accumulate)
        self.batch_tokens, self.held_out, self.dtype = rows * length, watched, loop.dtype

    def loss(self, model: CausalLM, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Mean nats a byte, and the same for display: every place is asked, and none is counted."""
        tokens, _, answers = tensors
        loss = next_token_loss(model.logits(model.hidden(tokens)[0].flatten(0, 1)), answers)
        return loss, loss

    def shown(self, figures: list[float]) -> dict[str, float]:
        return {"bits/byte": figures[0] / math.log(2)}

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        measured = measure(model, rows=self.held_out, dtype=self.dtype)
        return {"held_out_bits_per_byte": measured["bits_per_byte"]}


@torch.no_grad()
def measure(model: CausalLM, rows: Batch, *, dtype: str = "float32") -> dict[str, Any]:
    """Bits per byte of rows, each read from an empty state, under autocast if in "bfloat16".

    Also their standard_error over the rows (None for a single one); how many rows; and positions:
    [first, last, bits per byte] of the bytes at those places of their rows, from 1.
    """
    device, length = model.embedding.weight.device, rows.tokens.shape[1]
    step = max(1, tokens_at_once(device) // length)
    parts, pairs = [], (torch.from_numpy(x).split(step) for x in rows)
    for tokens, targets in zip(*pairs, strict=True):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            logits, _ = model(to_device(tokens, device))
        nats = F.cross_entropy(logits.float().mT, to_device(targets, device), reduction="none")
        parts.append(nats.cpu().double() / math.log(2))
    bits = torch.cat(parts)
    count, means = len(bits), bits.mean(1)
    places = bin_edges(length)
    return {
        "bits_per_byte": bits.mean().item(),
        "standard_error": means.std().item() / math.sqrt(count) if count > 1 else None,
        "rows": count,
        "positions": [[a, b, bits[:, a - 1 : b].mean().item()] for a, b in places],
    }


@dataclass(frozen=True, kw_only=True)
class TextCell(TrainedCell):
    """One small language model of bytes, on rows of `length` tokens.

    Under one seed every model sees the same rows in the same order.
    """

    length: int
    lengths: tuple[int, ...]
    """Held-out text is read in rows of so many tokens, each from an empty state; the first of them
    is also watched during training."""
    data: str | None = None
    """A text file, or a folder of them; None is the pinned text."""
    held_out_bytes: int = 500_000
    """Bytes to predict for each of `lengths`, at most."""
    watched_bytes: int = 65_536
    """Bytes to predict for each point of the curve, at most."""

    def lessons(self, ahead: bool) -> Lessons:
        read = read_pinned_text() if self.data is None else read_documents(self.data)
        training, held_out = (
            encode_documents([document.text for document in documents])
            for documents in split_documents(read.documents)
        )
        rows = {n: held_out_rows(held_out, n, self.held_out_bytes) for n in self.lengths}
        watched = held_out_rows(held_out, self.lengths[0], self.watched_bytes)
        dtype = self.loop.dtype

        def told(run: Trainer) -> Figures:
            tokens = run.step * self.rows * self.length
            return {
                "data": {"source": read.source, "bytes": read.num_bytes, "sha256": read.sha256},
                "tokens": tokens, "tokens_per_s": round(tokens / max(run.seconds, 1e-9)),
            }  # fmt: skip

        return Lessons(
            TextJob(self.rows, self.length, training, watched, self.loop),
            {str(n): partial(measure, rows=some, dtype=dtype) for n, some in rows.items()},
            told,
        )


def text_model(layer_types: str, size: str) -> ModelConfig:
    """A model of one mixer or pattern, with all that is not named here at the mixer's default."""
    form = SIZES[size]
    model = ModelConfig(vocab_size=VOCAB_SIZE, layer_types=layer_types, **form["model"])
    # A window is half of a row, where there is one.
    windowed = any(MIXERS[name].takes("window") for name in model.layer_types)
    return replace(model, window=form["cell"]["length"] // 2) if windowed else model


def text_cells(
    models: Mapping[str, ModelConfig], size: str, seeds: Sequence[int]
) -> list[TextCell]:
    """A run of each model and seed, MLPs sized so that all have the same number of parameters."""
    form = SIZES[size]
    return [
        TextCell(
            name=f"{name}-seed{seed}", model=equal_size(model, form["parameters"]),
            lengths=(form["cell"]["length"],), optimizer=OptimizerOptions(**form["optimizer"]),
            loop=LoopOptions(**form["loop"], seed=seed), **form["cell"],
        )
        for seed in seeds
        for name, model in models.items()
    ]  # fmt: skip


@cache
def equal_size(model: ModelConfig, parameters: int) -> ModelConfig:
    """The model with the MLP that brings it nearest to a number of parameters.

    It is refused if it has more without any MLP.
    """
    smallest = count_parameters(replace(model, mlp_size=MULTIPLE))
    each = count_parameters(replace(model, mlp_size=2 * MULTIPLE)) - smallest
    size = MULTIPLE * (1 + round((parameters - smallest) / each))
    if size < MULTIPLE:
        bare = count_parameters(replace(model, mlp_size=0))
        raise ValueError(
            f"parameters must be at least {smallest:,}, of which {bare:,} are not in the MLP, "
            f"got {parameters:,}"
        )
    return replace(model, mlp_size=size)


def bits(result: Result) -> float:
    """Bits per byte of held-out text, read in rows as long as those of training."""
    return float(first_evaluation(result)["bits_per_byte"])


def text_of(results: list[Result]) -> str:
    """What was read, for a reader."""
    data = [run.figures["data"] for run in results]
    texts = dict.fromkeys((text["source"], text["bytes"]) for text in data)
    told = " and ".join(f"{source}, {count:,} bytes" for source, count in texts)
    return f"Text: {told}, a tenth of them held out."
