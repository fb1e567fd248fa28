"""Selective copying: repeat the letters in their order, and leave out the blanks between them.

    . a . . c b . . a | . . . .
                        a c b a     labels, at the blanks after the bar

Source: the MAD benchmark (arXiv 2403.17844), task "selective copying".
"""

from dataclasses import dataclass

import numpy as np

from deltarule.nn.checks import check_least, check_that
from deltarule.tasks.batch import NO_LABEL, Batch
from deltarule.tasks.mad import measure as measure


@dataclass(frozen=True)
class Config:
    """Sizes of the task; the defaults are the benchmark's."""

    length: int = 256
    """Tokens in a row."""
    copied: int = 16
    """Letters to repeat."""
    vocab_size: int = 16
    """Tokens: letters, then the blank, then the bar."""

    def __post_init__(self) -> None:
        check_least(self, 1, "copied")
        check_least(self, 3, "vocab_size")
        said = f"length must be at least 2 * copied + 2 = {2 * self.copied + 2}"
        check_that(self.blanks >= 1, said, self.length)

    @property
    def blanks(self) -> int:
        return self.length - 2 * self.copied - 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the letters."""
        return 1 / (self.vocab_size - 2)


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, length], of which the last places are asked for."""
    blank, bar = config.vocab_size - 2, config.vocab_size - 1
    letters = rng.integers(config.vocab_size - 2, size=(rows, config.copied))
    # Every blank falls before one of the letters, each as likely; none after the last.
    shares = np.full(config.copied, 1 / config.copied)
    before = rng.multinomial(config.blanks, shares, size=rows).cumsum(axis=1)
    tokens = np.full((rows, config.length), blank, dtype=np.int64)
    labels = np.full((rows, config.length), NO_LABEL, dtype=np.int64)
    np.put_along_axis(tokens, before + np.arange(config.copied), letters, axis=1)
    tokens[:, config.copied + config.blanks] = bar
    labels[:, -config.copied :] = letters
    return Batch(tokens, labels)


def show(config: Config, rng: np.random.Generator) -> str:
    """One row: letters, dots for blanks, a bar, and the answers after it."""
    tokens, labels = (x[0].tolist() for x in generate(config, rng, rows=1))
    names = [chr(ord("a") + token) for token in range(config.vocab_size - 2)] + [".", "|"]
    answers = [names[label] for label in labels if label != NO_LABEL]
    row = "".join(names[token] for token in tokens[: -config.copied])
    return f"{row} -> {''.join(answers)}"
