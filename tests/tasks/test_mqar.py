"""The rows of associative recall are what tasks.md 3.1 describes."""

import numpy as np
import pytest

from deltarule.tasks.mqar import BLANK, NO_LABEL, Config, generate


@pytest.mark.parametrize("config", [Config(), Config(512, 64, 8192), Config(8, 2, 6)])
def test_every_query_is_answered_by_the_value_that_followed_its_key(config):
    tokens, labels = generate(config, np.random.default_rng(0), rows=20)
    context = 2 * config.pairs
    half = config.vocab_size // 2
    for row, answers in zip(tokens, labels, strict=True):
        keys, values = row[0:context:2], row[1:context:2]
        assert len(set(keys)) == len(set(values)) == config.pairs
        assert keys.min() >= 1
        assert keys.max() < half <= values.min()
        assert values.max() < config.vocab_size
        asked = np.flatnonzero(answers != NO_LABEL)
        assert len(asked) == config.pairs
        assert asked.min() >= context
        assert (asked % 2 == 0).all()
        memory = dict(zip(keys, values, strict=True))
        assert [memory[key] for key in row[asked]] == answers[asked].tolist()
        rest = np.setdiff1d(np.arange(context, config.length), asked)
        assert (row[rest] == BLANK).all()


def test_gaps_follow_the_power_law():
    config = Config(length=40, pairs=1, vocab_size=64)
    _, labels = generate(config, np.random.default_rng(0), rows=40_000)
    places = (config.length - 2) // 2
    counts = np.bincount(((labels != NO_LABEL).argmax(1) - 2) // 2, minlength=places)
    weights = np.arange(1, places + 1) ** (config.power_a - 1.0)
    assert np.abs(counts / counts.sum() - weights / weights.sum()).max() < 0.01
