"""Weights that are not trained multiply groups exactly over 20,000 tokens."""

import numpy as np
import pytest

from deltarule.tasks.groups import products, running_products
from experiments.constructions import Construction, reflections, rotation_matrices

# The writes for a token that each group needs, by the way it acts.
WRITES = {
    ("S_2", "permutations"): 1,
    ("S_3", "permutations"): 2,
    ("S_4", "permutations"): 3,
    ("S_5", "permutations"): 4,
    ("S_4", "rotations"): 2,
    ("A_5", "rotations"): 2,
}
TOKENS = 20_000
# Of a vector of length 1; the orbits' points are apart by 0.3 and more.
ERROR = 1e-10


@pytest.mark.parametrize(("group", "action"), WRITES)
def test_matrices_are_a_group_of_its_own_table(group, action):
    matrices = Construction(group, action).matrices
    assert np.allclose(matrices @ matrices.swapaxes(1, 2), np.eye(matrices.shape[1]), atol=1e-14)
    multiplied = matrices[:, None] @ matrices
    assert np.abs(multiplied - matrices[products(group)]).max() < 1e-14


@pytest.mark.parametrize("group", ["S_4", "A_5"])
def test_rotations_have_determinant_one_and_no_two_are_equal(group):
    matrices = rotation_matrices(group)
    assert np.allclose(np.linalg.det(matrices), 1)
    assert len(np.unique(matrices.round(6).reshape(len(matrices), -1), axis=0)) == len(matrices)


@pytest.mark.parametrize(("group", "action"), WRITES)
def test_the_first_vector_is_moved_by_every_element(group, action):
    orbit = Construction(group, action).orbit
    distances = np.linalg.norm(orbit[:, None] - orbit, axis=-1) + 9 * np.eye(len(orbit))
    assert distances.min() > 0.3
    assert np.allclose(np.linalg.norm(orbit, axis=1), 1)


@pytest.mark.parametrize(("construction", "writes"), WRITES.items(), ids=str)
def test_products_of_many_tokens_are_exact(construction, writes):
    group, action = construction
    exact = Construction(group, action)
    assert exact.n_steps == writes
    words = np.random.default_rng(0).integers(len(exact.matrices), size=TOKENS)
    run = exact.run(words)
    assert (run.products == running_products(group, words[None])[0]).all()
    assert run.error < ERROR


def test_an_orthogonal_matrix_is_the_product_of_its_reflections():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 6):
        matrix = np.linalg.qr(rng.standard_normal((size, size)))[0]
        product = np.eye(size)
        for key in reflections(matrix):
            product = product @ (np.eye(size) - 2 * np.outer(key, key))
        assert np.abs(product - matrix).max() < 1e-13
    assert reflections(np.eye(3)) == []


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_implementations_agree(impl):
    construction = Construction("A_5", "rotations")
    words = np.random.default_rng(0).integers(60, size=300)
    run = construction.run(words, impl)
    assert run.error < ERROR
    assert (run.products == running_products("A_5", words[None])[0]).all()


def test_one_write_too_few_is_not_enough():
    """The rank of M - 1 is the least number of reflections: S_3 has rotations, which need two."""
    for group, action in WRITES:
        construction = Construction(group, action)
        fixed = construction.matrices - np.eye(construction.matrices.shape[1])
        ranks = [np.linalg.matrix_rank(matrix, tol=1e-9) for matrix in fixed]
        assert [len(keys) for keys in construction.reflections] == ranks


def test_groups_without_rotations_are_refused():
    with pytest.raises(ValueError, match="group must be one of S_4, A_5, got 'S_5'"):
        rotation_matrices("S_5")
