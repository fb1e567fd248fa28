"""In-context recall and its noisy form: a key is always followed by the value it had before.

    k3 v1 k5 v4 n2 n9 k3 v1 k1 v4 ... k5
                      v1              v4     labels: values of keys seen before, and the last one

Keys and values come again and again, each key with one value within a row. `noise` is the share of
pairs replaced by two tokens that mean nothing.

Source: the MAD benchmark (arXiv 2403.17844), tasks "in-context recall" and "noisy in-context
recall", both with many queries.
"""

from dataclasses import dataclass

import numpy as np

from deltarule.nn.checks import check_least, check_that
from deltarule.tasks.batch import NO_LABEL, Batch, with_answers
from deltarule.tasks.mad import measure as measure


@dataclass(frozen=True)
class Config:
    """Sizes of the task; the defaults are the benchmark's in-context recall.

    Its noisy recall is `Config(vocab_size=32, noise_vocab_size=16, noise=0.2)`.
    """

    length: int = 128
    """Tokens of all pairs, an even number. The last value is only a label: a row has one less."""
    vocab_size: int = 16
    """Tokens: keys, then as many values (one more if the number is odd), then noise."""
    noise_vocab_size: int = 0
    """Tokens that only noise uses."""
    noise: float = 0.0
    """Probability that a pair is noise; at least one pair of a row is not."""
    training: bool = False
    """Label every next token, as the benchmark does in training, not only values of seen keys."""

    def __post_init__(self) -> None:
        even = self.length >= 4 and self.length % 2 == 0
        check_that(even, "length must be an even number of 4 or more", self.length)
        noisy, least = self.noise_vocab_size, self.noise_vocab_size + 2
        check_least(self, 0, "noise_vocab_size")
        said = f"vocab_size must be at least noise_vocab_size + 2 = {least}"
        check_that(self.vocab_size >= least, f"{said}, for one key and one value", self.vocab_size)
        check_that(0 <= self.noise < 1, "noise must be 0 or more and below 1", self.noise)
        said = f"noise_vocab_size must be 1 or more where noise is {self.noise}"
        check_that(noisy > 0 or self.noise == 0, said, noisy)

    @property
    def keys(self) -> int:
        """Different keys, the tokens from 0."""
        return (self.vocab_size - self.noise_vocab_size) // 2

    @property
    def values(self) -> int:
        """Different values, the tokens after the keys."""
        return self.vocab_size - self.noise_vocab_size - self.keys

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values."""
        return 1 / self.values


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, length - 1]."""
    pairs, every = config.length // 2, np.arange(rows)
    value_of = config.keys + rng.integers(config.values, size=(rows, config.keys))
    key = rng.integers(config.keys, size=(rows, pairs))
    noisy = rng.random((rows, pairs)) < config.noise
    noisy[every, rng.integers(pairs - 1, size=rows)] = False
    noisy[:, -1] = False
    seen = np.zeros((rows, config.keys), dtype=bool)
    again = np.zeros((rows, pairs), dtype=bool)
    for i in range(pairs - 1):
        again[:, i] = seen[every, key[:, i]] & ~noisy[:, i]
        seen[every, key[:, i]] |= ~noisy[:, i]
    # The last key is one of those seen, each as likely.
    key[:, -1], again[:, -1] = (seen * rng.random(seen.shape)).argmax(1), True

    sequence = np.stack([key, np.take_along_axis(value_of, key, axis=1)], axis=2)
    drawn = rng.integers(max(1, config.noise_vocab_size), size=sequence.shape)
    sequence = np.where(noisy[..., None], config.keys + config.values + drawn, sequence)
    sequence = sequence.reshape(rows, -1)
    labels = sequence[:, 1:].copy()
    if not config.training:
        labels[:, 0::2][~again] = NO_LABEL
        labels[:, 1::2] = NO_LABEL
    return Batch(sequence[:, :-1], labels)


def show(config: Config, rng: np.random.Generator) -> str:
    """One row in words: k, v and n (noise) with numbers, an arrow before each answer."""
    tokens, labels = (x[0].tolist() for x in generate(config, rng, rows=1))

    def word(token: int) -> str:
        if token < config.keys:
            return f"k{token}"
        value = token - config.keys
        return f"v{value}" if value < config.values else f"n{value - config.values}"

    return with_answers(word, tokens, labels)
