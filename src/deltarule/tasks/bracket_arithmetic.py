"""Modular arithmetic with brackets: nested sums and differences, and their value modulo 5.

    ( 3 - ( 2 + ( - 4 ) ) ) =      an expression of just the length that was drawn
    . . . . . . . . . . . . 0      the label, at the = sign: (3 - (2 + (-4))) mod 5

Source: "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537),
section 5.1; its code multiplies only if told to, and no configuration of it does.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deltarule.nn.checks import check_least
from deltarule.tasks.batch import Array, Batch, Lengths, one_answer

MODULUS = 5
# A number is its own token.
PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS, PADDING = range(MODULUS, MODULUS + 7)
# What stands at the place of the answer, as a model must not see it.
MASKED = 0
SIGNS = "+-*()="
# An expression shorter than this is a number, with or without a minus sign and brackets.
SHORTEST_SUM = 5


@dataclass(frozen=True)
class Config(Lengths):
    """Lengths of the task: the expression, =, the answer and one place of padding."""

    multiply: bool = False
    """Also multiply; the published column is the one without."""
    vocab_size: ClassVar[int] = PADDING + 1
    """Numbers, signs, brackets, = and padding."""
    chance: ClassVar[float] = 1 / MODULUS
    """Accuracy of guessing a number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 5, "longest")


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows of one label each, [rows, longest - 1]: all expressions at once, level by level."""
    tokens = np.full((rows, config.length), PADDING, dtype=np.int64)
    drawn = rng.integers(config.shortest, config.longest + 1, size=rows)
    sizes = np.maximum(drawn, SHORTEST_SUM) - 3
    starts = np.arange(rows) * config.length
    flat = tokens.reshape(-1)
    answers = write_expressions(flat, starts, sizes, config.multiply, rng)
    flat[starts + sizes] = EQUALS
    flat[starts + sizes + 1] = MASKED
    return one_answer(tokens, sizes[:, None], answers[:, None])


def write_expressions(
    tokens: Array, starts: Array, sizes: Array, multiply: bool, rng: np.random.Generator
) -> Array:
    """Write an expression of each size at each start, and return their values.

    A long one is (left + right), whose parts are expressions of their own; the size of the left one
    is uniform in what leaves room for the right one.
    """
    values = np.zeros_like(sizes)
    short = sizes < SHORTEST_SUM
    values[short] = write_numbers(tokens, starts[short], sizes[short], rng)
    if short.all():
        return values
    starts, sizes = starts[~short], sizes[~short]
    left_sizes = rng.integers(1, sizes - 3)
    signs = starts + 1 + left_sizes
    operators = rng.integers(PLUS, TIMES + multiply, size=len(sizes))
    tokens[starts], tokens[signs], tokens[starts + sizes - 1] = OPEN, operators, CLOSE
    parts = np.append(starts + 1, signs + 1), np.append(left_sizes, sizes - left_sizes - 3)
    left, right = np.split(write_expressions(tokens, *parts, multiply, rng), 2)
    added = left + np.where(operators == MINUS, -right, right)
    values[~short] = np.where(operators == TIMES, left * right, added) % MODULUS
    return values


def write_numbers(tokens: Array, starts: Array, sizes: Array, rng: np.random.Generator) -> Array:
    """Write n, -n, (n) or (-n), by the size from 1 to 4, and return the values."""
    numbers = rng.integers(MODULUS, size=len(sizes))
    bracketed, negative = sizes >= 3, sizes % 2 == 0
    tokens[starts[bracketed]], tokens[(starts + sizes - 1)[bracketed]] = OPEN, CLOSE
    tokens[(starts + bracketed)[negative]] = MINUS
    tokens[starts + bracketed + negative] = numbers
    return np.where(negative, -numbers, numbers) % MODULUS


def show(config: Config, rng: np.random.Generator) -> str:
    tokens, labels = (x[0].tolist() for x in generate(config, rng, rows=1))
    end = tokens.index(EQUALS) + 1
    words = [str(t) if t < MODULUS else SIGNS[t - MODULUS] for t in tokens[:end]]
    return f"{' '.join(words)}  {max(labels)}  (mod {MODULUS})"
