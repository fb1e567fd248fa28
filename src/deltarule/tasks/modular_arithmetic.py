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
    # Places of all rows side by side: a step of training takes a GPU no longer than 200 calls here.
    tokens = np.ascontiguousarray(tokens.T)
    terms, signs = tokens[::2] - ZERO, tokens[1::2]
    times = signs == TIMES
    terms[1:] *= 1 - 2 * (signs == MINUS)[: len(terms) - 1]
    for i in range(1, len(terms)):
        # Reduced at once: a long product would overflow.
        np.copyto(terms[i], terms[i - 1] * terms[i] % MODULUS, where=times[i - 1])
    last, places = ends.T // 2, np.arange(len(terms))[:, None]
    # A product's last number is the row's, or has another sign than * behind it.
    complete = places == last
    complete[: len(times)] |= ~times[: len(terms)] & (places[: len(times)] < last)
    return (terms * complete).sum(0)[:, None] % MODULUS


def show(config: Config, rng: np.random.Generator) -> str:
    tokens, labels = (x[0] for x in generate(config, rng, rows=1))
    signs = dict(zip((PLUS, MINUS, TIMES, EQUALS), "+-*=", strict=True))
    words = [signs.get(token, str(token - ZERO)) for token in tokens[tokens != BLANK].tolist()]
    return f"{' '.join(words)}  {labels[labels != NO_LABEL][0] - ZERO}  (mod {MODULUS})"
