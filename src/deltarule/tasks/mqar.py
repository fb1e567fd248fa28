"""Multi-query associative recall: pairs of key and value, then keys alone; answer each value.

    k1 v1 k2 v2 ... kP vP  .  k2  .  .  .  k1  .   and so on to the length
                              v2           v1      labels, at the keys that come again

Source: Zoology (arXiv 2312.04927), as used in DeltaNet (arXiv 2406.06484), figure 2.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltarule.nn.checks import check_least, check_that
from deltarule.tasks.batch import NO_LABEL, Array, Batch, with_answers

Weights = NDArray[np.float64]

# What fills the places between queries.
BLANK = 0
# Nearly all of a draw is NumPy's, which lets other threads go on; each of them holds 20 MB.
THREADS = 8


@dataclass(frozen=True)
class Config:
    """Sizes of the task.

    Keys are drawn from 1 to vocab_size/2 - 1, values from vocab_size/2 to vocab_size - 1, each
    distinct within a row. A model that only knows which values occurred is right once in `pairs`.
    """

    length: int = 64
    """Tokens in a row: the pairs, then room for the queries."""
    pairs: int = 8
    """Pairs of key and value in a row; each key is queried once."""
    vocab_size: int = 512
    """Tokens: half of them keys, half values."""
    power_a: float = 0.01
    """A gap g before a query has weight g^(power_a - 1): small values put queries early."""

    def __post_init__(self) -> None:
        check_least(self, 1, "pairs")
        least = f"length must be at least 4 * pairs = {4 * self.pairs}"
        said = f"{least}, two tokens for each pair and two for its query"
        check_that(self.length >= 4 * self.pairs, said, self.length)
        said = f"vocab_size must be at least {2 * self.pairs + 2} for {self.pairs} distinct keys"
        check_that(self.vocab_size // 2 - 1 >= self.pairs, said, self.vocab_size)
        check_that(self.power_a > 0, "power_a must be above 0", self.power_a)

    @property
    def chance(self) -> float:
        """Accuracy of guessing one of the row's own values."""
        return 1 / self.pairs


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, length], each with `pairs` labels."""
    half = config.vocab_size // 2
    keys = 1 + distinct(rng, rows, half - 1, config.pairs)
    values = half + distinct(rng, rows, config.vocab_size - half, config.pairs)
    context = 2 * config.pairs
    tokens = np.full((rows, config.length), BLANK, dtype=np.int64)
    labels = np.full((rows, config.length), NO_LABEL, dtype=np.int64)
    tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
    places = (config.length - context) // 2
    weights = np.arange(1.0, places + 1) ** (config.power_a - 1)
    queries = context + 2 * distinct(rng, rows, places, config.pairs, weights)
    np.put_along_axis(tokens, queries, keys, axis=1)
    np.put_along_axis(labels, queries, values, axis=1)
    return Batch(tokens, labels)


def distinct(
    rng: np.random.Generator, rows: int, choices: int, count: int, weights: Weights | None = None
) -> Array:
    """Draw `count` distinct numbers below `choices` for each row, one after another.

    The smallest of exponential times e_i / w_i come in the order in which draws with weights w,
    without replacement, would come.
    """
    times = rng.standard_exponential((rows, choices))
    if weights is not None:
        times /= weights
    if count == choices:
        return times.argsort(axis=1)
    # The order of the many numbers that are not drawn does not matter.
    drawn = np.argpartition(times, count, axis=1)[:, :count]
    return np.take_along_axis(drawn, np.take_along_axis(times, drawn, 1).argsort(axis=1), 1)


def show(config: Config, rng: np.random.Generator) -> str:
    """One row in words: k and v with numbers, a dot for a blank, an arrow before each answer."""
    tokens, labels = (x[0].tolist() for x in generate(config, rng, rows=1))
    half = config.vocab_size // 2

    def word(token: int) -> str:
        if token == BLANK:
            return "."
        return f"k{token}" if token < half else f"v{token - half}"

    context = 2 * config.pairs
    pairs = " ".join(word(token) for token in tokens[:context])
    queries = with_answers(word, tokens[context:], labels[context:])
    return f"pairs    {pairs}\nqueries  {queries}"
