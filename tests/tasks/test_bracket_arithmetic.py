"""Expressions with brackets have the original's distribution, and Python's values."""

import numpy as np
import pytest

from deltarule.tasks.batch import NO_LABEL
from deltarule.tasks.bracket_arithmetic import (
    EQUALS,
    MODULUS,
    PADDING,
    SIGNS,
    TIMES,
    Config,
    generate,
)

# What the generator of the paper's experiments draws with seed 7 for rows of 3 to 20 places, in
# hexadecimal and up to the answer.
ORIGINAL = ["88864966295845199a3", "84549a3", "88609539a3", "88619519a0"]


def written(tokens):
    """A row up to its = sign, as Python reads it."""
    read = tokens[: tokens.index(EQUALS)]
    return "".join(str(t) if t < MODULUS else SIGNS[t - MODULUS] for t in read)


def in_order(length, rng):
    """An expression as the original draws it: one after another, the left part first."""
    if length < 5:
        number = str(rng.integers(5))
        return [number, f"-{number}", f"({number})", f"(-{number})"][length - 1]
    left = rng.integers(1, length - 3)
    parts = in_order(left, rng), in_order(length - left - 3, rng)
    return f"({parts[0]}{'+-'[rng.integers(2)]}{parts[1]})"


def test_the_order_of_draws_that_the_test_compares_with_is_the_original_one():
    rng = np.random.default_rng(7)
    for original in ORIGINAL:
        tokens = [int(letter, 16) for letter in original]
        expression = in_order(max(rng.integers(3, 21), 5) - 3, rng)
        assert expression == written(tokens)
        assert eval(expression) % MODULUS == tokens[-1]


@pytest.mark.parametrize(
    "config", [Config(), Config(40, 256), Config(3, 5), Config(multiply=True)], ids=str
)
def test_the_label_is_the_value(config):
    tokens, labels = generate(config, np.random.default_rng(0), rows=200)
    assert tokens.shape == labels.shape == (200, config.length)
    for row, answers in zip(tokens.tolist(), labels, strict=True):
        (place,) = np.flatnonzero(answers != NO_LABEL)
        assert row[place] == EQUALS
        assert max(config.shortest, 5) <= place + 3 <= config.longest
        assert answers[place] == eval(written(row)) % MODULUS
        assert set(row[place + 2 :]) <= {PADDING}
    assert (tokens == TIMES).any() == config.multiply


def test_expressions_are_drawn_as_the_original_draws_them():
    rows, length = 20_000, 14
    tokens, _ = generate(Config(length + 3, length + 3), np.random.default_rng(0), rows)
    rng = np.random.default_rng(1)
    ours = [written(row) for row in tokens.tolist()]
    theirs = [in_order(length, rng) for _ in range(rows)]
    for place in range(length):
        shares = [
            np.array([sum(e[place] == letter for e in drawn) for letter in "0123(+-)"]) / rows
            for drawn in (ours, theirs)
        ]
        assert np.abs(shares[0] - shares[1]).max() < 0.02
    # The shape: where the sign of the outermost sum stands.
    splits = [
        np.bincount([left_size(e) for e in drawn], minlength=length) for drawn in (ours, theirs)
    ]
    assert np.abs(splits[0] - splits[1]).max() / rows < 0.02


def left_size(expression):
    """Characters of the left part of the outermost sum."""
    depth = 0
    for place, letter in enumerate(expression[1:]):
        if depth == 0 and place and letter in "+-":
            return place
        depth += {"(": 1, ")": -1}.get(letter, 0)
    raise AssertionError(expression)
