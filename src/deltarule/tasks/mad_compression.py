"""Compression: keep a row of random tokens in one vector, from which each of them is read again.

    c a d a b #
    c a d a b #     labels: the token at the same place

It is a task for an autoencoder: only the model's state at the last token, which says nothing
itself, goes to the decoder, with each position in turn.

Source: the MAD benchmark (arXiv 2403.17844), task "compression".
"""

from dataclasses import dataclass

import numpy as np

from deltarule.nn.checks import check_least
from deltarule.tasks.batch import Batch
from deltarule.tasks.mad import measure as measure


@dataclass(frozen=True)
class Config:
    """Sizes of the task; the defaults are the benchmark's."""

    length: int = 32
    """Tokens in a row, the last of them always the same."""
    vocab_size: int = 16
    """Tokens, the last one for the end of a row."""

    def __post_init__(self) -> None:
        check_least(self, 2, "length", "vocab_size")

    @property
    def chance(self) -> float:
        """Accuracy of one guess for all random tokens, and of the last token, always right."""
        return 2 / self.vocab_size


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, length], and the same again as labels."""
    tokens = np.full((rows, config.length), config.vocab_size - 1, dtype=np.int64)
    tokens[:, :-1] = rng.integers(config.vocab_size - 1, size=(rows, config.length - 1))
    return Batch(tokens, tokens.copy())


def show(config: Config, rng: np.random.Generator) -> str:
    """One row: numbers, and # for the last token."""
    tokens = generate(config, rng, rows=1).tokens[0, :-1].tolist()
    return " ".join([*map(str, tokens), "# -> the same"])
