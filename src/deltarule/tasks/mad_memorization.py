"""Memorization: keys have one value each, the same in all rows, that no row shows.

    k3 ? k7 ? k3 ?
       v5   v1   v5     labels, at the question marks

The map can only be learned into the weights, and training sees few rows.

Source: the MAD benchmark (arXiv 2403.17844), task "memorization"; the map is the one its code draws
from the same seed.
"""

from dataclasses import dataclass

import numpy as np

from deltarule.nn.checks import check_least, check_that
from deltarule.tasks.batch import NO_LABEL, Array, Batch
from deltarule.tasks.mad import measure as measure


@dataclass(frozen=True)
class Config:
    """Sizes of the task; the defaults are the benchmark's."""

    length: int = 32
    """Tokens in a row, an even number: keys and question marks in turn."""
    vocab_size: int = 256
    """Tokens: keys, values (as many, or one more that stays unused), and the question mark."""
    map_seed: int = 12345
    """Decides which value belongs to which key."""

    def __post_init__(self) -> None:
        even = self.length >= 2 and self.length % 2 == 0
        check_that(even, "length must be an even number of 2 or more", self.length)
        check_least(self, 3, "vocab_size")

    @property
    def keys(self) -> int:
        """Different keys, the tokens from 0."""
        return (self.vocab_size - 1) // 2

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values in use."""
        return 1 / self.keys


def values(config: Config) -> Array:
    """The value of each key, [keys].

    Examples:
        >>> values(Config(vocab_size=7))
        array([3, 5, 4])
    """
    rng = np.random.default_rng(config.map_seed)
    keys = rng.permutation(config.keys)
    order = config.keys + rng.permutation(config.vocab_size - 1 - config.keys)
    return order[keys.argsort()]


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, length], all of one map, which the generator does not draw."""
    keys = rng.integers(config.keys, size=(rows, config.length // 2))
    tokens = np.full((rows, config.length), config.vocab_size - 1, dtype=np.int64)
    labels = np.full((rows, config.length), NO_LABEL, dtype=np.int64)
    tokens[:, 0::2], labels[:, 1::2] = keys, values(config)[keys]
    return Batch(tokens, labels)


def show(config: Config, rng: np.random.Generator) -> str:
    """One row in words: keys, and behind each question mark an arrow to the value."""
    tokens, labels = (x[0].tolist() for x in generate(config, rng, rows=1))
    pairs = zip(tokens[0::2], labels[1::2], strict=True)
    return " ".join(f"k{key} ?->v{value - config.keys}" for key, value in pairs)
