"""Rows of parity and arithmetic are the originals', and their labels are what Python computes."""

import numpy as np
import pytest

from deltarule.tasks import bracket_arithmetic as brackets
from deltarule.tasks import modular_arithmetic as modular
from deltarule.tasks import parity
from deltarule.tasks.batch import NO_LABEL


def odd(row):
    """The answer to a row of bits."""
    return parity.SET if (row == parity.SET).sum() % 2 else parity.CLEAR


def value(row):
    """The answer to numbers with signs between them, up to the = sign."""
    read = row[: row.tolist().index(modular.EQUALS)]
    assert (read[::2] >= modular.ZERO).all()
    assert (read[1::2] <= modular.TIMES).all()
    words = ["+-*"[t - 1] if t < modular.ZERO else str(t - modular.ZERO) for t in read]
    return eval("".join(words)) % modular.MODULUS + modular.ZERO


def written(tokens):
    """A row of brackets up to its = sign, as Python reads it."""
    read, least = tokens[: tokens.index(brackets.EQUALS)], brackets.MODULUS
    return "".join(str(t) if t < least else brackets.SIGNS[t - least] for t in read)


def bracketed(row):
    """The answer to a row of brackets."""
    tokens = row.tolist()
    assert set(tokens[tokens.index(brackets.EQUALS) + 2 :]) <= {brackets.PADDING}
    return eval(written(tokens)) % brackets.MODULUS


# The task, its answer to a row, the least length of one, and sizes.
LANGUAGES = [
    *((parity, odd, 3, parity.Config(*sizes)) for sizes in ((), (40, 256), (9, 9))),
    *((modular, value, 3, modular.Config(*sizes)) for sizes in ((), (40, 256), (9, 9), (3, 3))),
    *((brackets, bracketed, 5, brackets.Config(*sizes)) for sizes in ((), (40, 256), (3, 5))),
    (brackets, bracketed, 5, brackets.Config(multiply=True)),
]


@pytest.mark.parametrize(("task", "answer", "least", "config"), LANGUAGES)
def test_the_label_is_the_value(task, answer, least, config):
    tokens, labels = task.generate(config, np.random.default_rng(0), rows=200)
    assert tokens.shape == labels.shape == (200, config.length)
    # What stands at the place of the answer, = included; a row of modular arithmetic is odd.
    behind, shortest = 3 if task is brackets else 2, config.shortest - (task is modular)
    for row, answers in zip(tokens, labels, strict=True):
        (place,) = np.flatnonzero(answers != NO_LABEL)
        assert max(shortest, least - (task is modular)) <= place + behind <= config.longest
        assert answers[place] == answer(row)
        assert task is parity or row[place] == task.EQUALS
    if task is brackets:
        assert (tokens == brackets.TIMES).any() == config.multiply


def test_every_position_of_parity_asks_after_each_bit():
    one, every = (
        parity.generate(
            parity.Config(3, 20, every_position=every), np.random.default_rng(0), rows=50
        )
        for every in (False, True)
    )
    assert (one.tokens == every.tokens).all()
    assert (every.labels[one.labels >= 0] == one.labels[one.labels >= 0]).all()
    assert ((every.labels == NO_LABEL) == (every.tokens == parity.BLANK)).all()
    counted = parity.CLEAR + (every.tokens == parity.SET).cumsum(1) % 2
    assert (every.labels == counted)[every.tokens != parity.BLANK].all()


# What the generator of the paper's experiments draws with seed 7 for rows of 3 to 20 places, in
# hexadecimal and up to the answer.
ORIGINAL = ["88864966295845199a3", "84549a3", "88609539a3", "88619519a0"]


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
        assert eval(expression) % brackets.MODULUS == tokens[-1]


def test_expressions_are_drawn_as_the_original_draws_them():
    rows, length = 20_000, 14
    config = brackets.Config(length + 3, length + 3)
    tokens, _ = brackets.generate(config, np.random.default_rng(0), rows)
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
