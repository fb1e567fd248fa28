"""The rows of modular arithmetic are the original's, and their labels are what Python computes."""

import numpy as np
import pytest

from deltarule.tasks.batch import NO_LABEL
from deltarule.tasks.modular_arithmetic import EQUALS, MODULUS, TIMES, ZERO, Config, generate

SIGNS = "+-*"


def python_value(tokens):
    """Of a row up to its = sign."""
    words = [SIGNS[t - 1] if t < ZERO else str(t - ZERO) for t in tokens]
    return eval("".join(words)) % MODULUS


@pytest.mark.parametrize("config", [Config(), Config(40, 256), Config(9, 9), Config(3, 3)])
def test_the_label_is_the_value(config):
    tokens, labels = generate(config, np.random.default_rng(0), rows=200)
    assert tokens.shape == labels.shape == (200, config.length)
    for row, answers in zip(tokens, labels, strict=True):
        (place,) = np.flatnonzero(answers != NO_LABEL)
        assert config.shortest - 1 <= place + 2 <= config.longest
        assert row[place] == EQUALS
        assert (row[:place:2] >= ZERO).all()
        assert (row[1:place:2] <= TIMES).all()
        assert answers[place] - ZERO == python_value(row[:place])


def test_numbers_and_signs_are_uniform():
    tokens, _ = generate(Config(41, 41), np.random.default_rng(0), rows=5_000)
    numbers, signs = tokens[:, 0:39:2], tokens[:, 1:38:2]
    assert np.abs(np.bincount(numbers.ravel() - ZERO) / numbers.size - 1 / 5).max() < 0.005
    assert np.abs(np.bincount(signs.ravel())[1:] / signs.size - 1 / 3).max() < 0.005
