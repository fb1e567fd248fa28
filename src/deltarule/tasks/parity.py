"""Parity: bits, and whether an odd number of them is set.

    1 2 2 1 2 0 0      1 is a clear bit, 2 a set one; 0 fills the row
    . . . . 2 . .      the label, at the last bit: 1 for even, 2 for odd

Source: the formal languages of xLSTM (arXiv 2405.04517), as used in "Unlocking State-Tracking in
Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537), section 5.1.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deltarule.tasks.batch import NO_LABEL, Batch, Lengths, one_answer

BLANK, CLEAR, SET = 0, 1, 2


@dataclass(frozen=True)
class Config(Lengths):
    """Lengths of the task, the place of the answer counted: length 40 has 39 bits."""

    every_position: bool = False
    """Ask after every bit, not only after the last: far more to learn from in each row."""
    vocab_size: ClassVar[int] = 3
    chance: ClassVar[float] = 0.5
    """Accuracy of a coin."""


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, longest - 1]; the draws are those of the original, in its order."""
    tokens = rng.integers(CLEAR, SET + 1, size=(rows, config.length))
    bits = rng.integers(config.shortest, config.longest + 1, size=rows) - 1
    beyond = np.arange(config.length) >= bits[:, None]
    tokens[beyond] = BLANK
    answers = CLEAR + (tokens == SET).cumsum(axis=1) % 2
    if config.every_position:
        return Batch(tokens, np.where(beyond, NO_LABEL, answers))
    last = bits[:, None] - 1
    return one_answer(tokens, last, np.take_along_axis(answers, last, axis=1))


def show(config: Config, rng: np.random.Generator) -> str:
    tokens, labels = (x[0] for x in generate(config, rng, rows=1))
    bits = " ".join("01"[token - CLEAR] for token in tokens[tokens != BLANK])
    odd = labels[labels != NO_LABEL][-1] == SET
    return f"bits    {bits}\nanswer  {'odd' if odd else 'even'}"
