"""A cell that trains one small language model on text, and measures it by position."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.nn.checks import check_least, check_multiple
from deltarule.nn.gates import starting_horizons
from deltarule.train.data import Corpus, encode_documents
from deltarule.train.documents import read_documents, split_documents
from deltarule.train.loop import LoopOptions, Trainer, evaluating
from deltarule.train.metrics import read_metrics
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.random_state import seed_everything
from experiments.experiment import SAVE_SECONDS
from experiments.pinned_text import read_pinned_text
from experiments.text_rows import TextRows, held_out_rows, measure


@dataclass(frozen=True, kw_only=True)
class TextCell:
    """One small language model of bytes.

    Under one seed every model sees the same rows in the same order.
    """

    name: str
    model: ModelConfig
    """Its vocab_size is that of bytes."""
    length: int
    """Tokens of a training row."""
    rows: int
    """Rows in each step."""
    lengths: tuple[int, ...]
    """Held-out text is read in rows of so many tokens, each from an empty state; the first of them
    is also watched during training."""
    optimizer: OptimizerOptions
    """Rates, decay and clipping."""
    loop: LoopOptions
    """Steps, seed and dtype; its device is the experiment's."""
    data: str | None = None
    """A text file, or a folder of them; None is the pinned text."""
    held_out_bytes: int = 500_000
    """Bytes to predict for each of `lengths`, at most."""
    watched_bytes: int = 65_536
    """Bytes to predict for each point of the curve, at most."""

    def __post_init__(self) -> None:
        check_least(self, 1, "length", "rows", "held_out_bytes", "watched_bytes")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be numbers of 1 or more, got {self.lengths}")
        check_multiple("rows", self.rows, "accumulate", self.loop.accumulate)
        if self.model.vocab_size != VOCAB_SIZE:
            raise ValueError(
                f"model.vocab_size must be {VOCAB_SIZE}, for bytes and the begin of a document, "
                f"got {self.model.vocab_size}"
            )

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Train, or go on from the newest checkpoint, and measure.

        `evaluations`: for each length what `measure` returns; `curve`: [step, bits per byte of
        held-out text]; `data`: source, bytes and sha256; `horizons`: in tokens, that each head of
        each gated layer started with; `tokens` trained on, `steps`, `parameters`,
        `training_seconds`, `tokens_per_s`.
        """
        read = read_pinned_text() if self.data is None else read_documents(self.data)
        training, held_out = (
            encode_documents([document.text for document in documents])
            for documents in split_documents(read.documents)
        )
        rows = {str(n): held_out_rows(held_out, n, self.held_out_bytes) for n in self.lengths}
        seed_everything(self.loop.seed)
        model = CausalLM(self.model)
        horizons = starting_horizons(model)
        trainer = self.trainer(model, training, held_out, folder, device)
        trainer.run()
        with evaluating(model):
            evaluations = {
                n: measure(model, some, dtype=self.loop.dtype) for n, some in rows.items()
            }
        tokens = trainer.step * self.rows * self.length
        return {
            "evaluations": evaluations, "curve": curve(folder / "metrics.jsonl"),
            "data": {"source": read.source, "bytes": read.num_bytes, "sha256": read.sha256},
            "horizons": horizons, "tokens": tokens, "steps": trainer.step,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training_seconds": round(trainer.seconds, 1),
            "tokens_per_s": round(tokens / max(trainer.seconds, 1e-9)),
        }  # fmt: skip

    def trainer(
        self,
        model: CausalLM,
        training: Corpus,
        held_out: Corpus,
        folder: Path,
        device: torch.device,
    ) -> Trainer:
        """The model with these weights, or as its newest checkpoint has them."""
        loop = dataclasses.replace(self.loop, device=str(device))
        watched = held_out_rows(held_out, self.lengths[0], self.watched_bytes)
        return Trainer(
            model, TextRows(self.rows, self.length, training, watched, loop), options=loop,
            optimizer_options=self.optimizer, folder=folder, resume=True, save_seconds=SAVE_SECONDS,
        )  # fmt: skip


def curve(metrics: Path) -> list[list[float]]:
    """Step and held-out bits per byte of every short evaluation."""
    name = "held_out_bits_per_byte"
    return [[row["step"], row[name]] for row in read_metrics(metrics) if name in row]
