"""The word problems are over groups, and their labels are products of permutations."""

import numpy as np
import pytest

from deltarule.tasks.batch import NO_LABEL
from deltarule.tasks.groups import Config, elements, generate, products

ORDERS = {"S_2": 2, "S_3": 6, "S_4": 24, "A_5": 60, "S_5": 120}


@pytest.mark.parametrize(("group", "order"), ORDERS.items())
def test_the_table_is_that_of_the_permutations(group, order):
    own, table = elements(group), products(group)
    assert len(own) == order == Config(group).order
    assert sorted(map(tuple, own)) == [tuple(p) for p in own]
    assert (own[0] == np.arange(own.shape[1])).all()
    assert (own[table] == own[:, own].reshape(order, order, -1)).all()
    # Each row and column is a permutation of the group: every element has an inverse.
    for axis in (0, 1):
        assert (np.sort(table, axis=axis).swapaxes(0, axis) == np.arange(order)[:, None]).all()
    # Only even permutations are in the alternating group.
    signs = [np.linalg.det(np.eye(own.shape[1])[p]) for p in own]
    assert np.allclose(signs, 1) == group.startswith("A")


@pytest.mark.parametrize("group", ORDERS)
def test_labels_are_the_products_so_far(group):
    config = Config(group, length=20)
    tokens, labels = generate(config, np.random.default_rng(0), rows=30)
    assert tokens.shape == labels.shape == (30, 21)
    assert (tokens[:, 0] == config.order).all()
    assert (labels[:, 0] == NO_LABEL).all()
    assert tokens.max() == config.vocab_size - 1
    for row, answers in zip(tokens[:, 1:], labels[:, 1:], strict=True):
        arranged = np.arange(elements(group).shape[1])
        for token, answer in zip(row, answers, strict=True):
            arranged = arranged[elements(group)[token]]
            assert (elements(group)[answer] == arranged).all()


def test_elements_are_uniform_and_so_are_products():
    tokens, labels = generate(Config("S_4", 100), np.random.default_rng(0), rows=2_000)
    for drawn in (tokens[:, 1:], labels[:, 1:]):
        assert np.abs(np.bincount(drawn.ravel(), minlength=24) / 200_000 - 1 / 24).max() < 0.003
