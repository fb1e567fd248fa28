"""Modular arithmetic: numbers, signs between them, and the value of it all modulo 5.

    3 - 2 * 4 + 1 =      a number at every even place, + - or * at every odd one
    . . . . . . . 1      the label, at the = sign: (3 - 2 * 4 + 1) mod 5; * binds tighter

Source: the formal languages of xLSTM (arXiv 2405.04517), as used in "Unlocking State-Tracking in
Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537), section 5.1.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deltarule.tasks.batch import NO_LABEL, Array, Batch, Lengths, one_answer

BLANK, PLUS, MINUS, TIMES, EQUALS, ZERO = range(6)
MODULUS = 5


@dataclass(frozen=True)
class Config(Lengths):
    """Lengths of the task, = and the answer counted; a row's own length is always odd."""

    vocab_size: ClassVar[int] = ZERO + MODULUS
    """The blank, four signs and the numbers."""
    chance: ClassVar[float] = 1 / MODULUS
    """Accuracy of guessing a number."""


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows of one label each, [rows, longest - 1]; the draws are the original's, in its order."""
    tokens = rng.integers(MODULUS, size=(rows, config.longest)) + ZERO
    tokens[:, 1::2] = rng.integers(3, size=(rows, config.longest // 2)) + PLUS
    fewest, most = (config.shortest + 1) // 2, (config.longest + 1) // 2
    # Of every length n there are (n - 1) / 2 numbers, a sign after each, and the answer.
    equals = 2 * rng.integers(fewest, most + 1, size=(rows, 1)) - 3
    answers = values(tokens, equals) + ZERO
    tokens[np.arange(config.longest) > equals] = BLANK
    np.put_along_axis(tokens, equals, EQUALS, axis=1)
    return one_answer(tokens[:, : config.length], equals, answers)


def values(tokens: Array, ends: Array) -> Array:
    """The value of each row's tokens before its end, both [rows, 1]: a sum of signed products."""
    total = np.zeros_like(ends)
    sign = np.ones_like(ends)
    product = tokens[:, :1] - ZERO
    for place in range(1, int(ends.max()), 2):
        operator, number = tokens[:, place : place + 1], tokens[:, place + 1 : place + 2] - ZERO
        inside, times = place < ends, operator == TIMES
        total = np.where(inside & ~times, total + sign * product, total)
        sign = np.where(inside & ~times, np.where(operator == MINUS, -1, 1), sign)
        # Reduced at once: a long product would overflow.
        product = np.where(inside, np.where(times, product * number % MODULUS, number), product)
    return (total + sign * product) % MODULUS


def show(config: Config, rng: np.random.Generator) -> str:
    tokens, labels = (x[0] for x in generate(config, rng, rows=1))
    signs = dict(zip((PLUS, MINUS, TIMES, EQUALS), "+-*=", strict=True))
    words = [signs.get(token, str(token - ZERO)) for token in tokens[tokens != BLANK].tolist()]
    return f"{' '.join(words)}  {labels[labels != NO_LABEL][0] - ZERO}  (mod {MODULUS})"
