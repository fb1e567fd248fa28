"""The rows of parity are the original's, and their labels count bits."""

import numpy as np
import pytest

from deltarule.tasks.batch import NO_LABEL
from deltarule.tasks.parity import BLANK, CLEAR, SET, Config, generate


@pytest.mark.parametrize("config", [Config(), Config(40, 256), Config(9, 9)])
def test_the_label_says_whether_the_bits_are_odd(config):
    tokens, labels = generate(config, np.random.default_rng(0), rows=200)
    assert tokens.shape == labels.shape == (200, config.length)
    for row, answers in zip(tokens, labels, strict=True):
        (place,) = np.flatnonzero(answers != NO_LABEL)
        assert config.shortest <= place + 2 <= config.longest
        assert answers[place] == (SET if (row == SET).sum() % 2 else CLEAR)


def test_every_position_asks_after_each_bit():
    one = generate(Config(3, 20), np.random.default_rng(0), rows=50)
    every = generate(Config(3, 20, every_position=True), np.random.default_rng(0), rows=50)
    assert (one.tokens == every.tokens).all()
    assert (every.labels[one.labels >= 0] == one.labels[one.labels >= 0]).all()
    assert ((every.labels == NO_LABEL) == (every.tokens == BLANK)).all()
    counted = CLEAR + (every.tokens == SET).cumsum(1) % 2
    assert (every.labels == counted)[every.tokens != BLANK].all()


def test_lengths_and_answers_are_uniform():
    _, labels = generate(Config(3, 12), np.random.default_rng(0), rows=50_000)
    lengths = (labels != NO_LABEL).argmax(1) + 2
    assert np.abs(np.bincount(lengths)[3:] / 50_000 - 0.1).max() < 0.005
    assert abs((labels == SET).sum() / 50_000 - 0.5) < 0.01
