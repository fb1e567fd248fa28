"""Weights that are not trained multiply groups exactly over 20,000 tokens."""

import numpy as np
import pytest

from deltarule.tasks.groups import running_products
from experiments.constructions import Construction

# The writes for a token that each group needs, by the way it acts.
WRITES = {
    ("S_2", "permutations"): 1, ("S_3", "permutations"): 2, ("S_4", "permutations"): 3,
    ("S_5", "permutations"): 4, ("S_4", "rotations"): 2, ("A_5", "rotations"): 2,
}  # fmt: skip
TOKENS = 20_000
# Of a vector of length 1; the orbits' points are apart by 0.3 and more.
ERROR = 1e-10


@pytest.mark.parametrize(("construction", "writes"), WRITES.items(), ids=str)
def test_products_of_many_tokens_are_exact(construction, writes):
    group, action = construction
    exact = Construction(group, action)
    assert exact.n_steps == writes
    words = np.random.default_rng(0).integers(len(exact.matrices), size=TOKENS)
    run = exact.run(words)
    assert (run.products == running_products(group, words[None])[0]).all()
    assert run.error < ERROR


def test_one_write_too_few_is_not_enough():
    """The rank of M - 1 is the least number of reflections: S_3 has rotations, which need two."""
    for group, action in WRITES:
        construction = Construction(group, action)
        fixed = construction.matrices - np.eye(construction.matrices.shape[1])
        ranks = [np.linalg.matrix_rank(matrix, tol=1e-9) for matrix in fixed]
        assert [len(keys) for keys in construction.reflections] == ranks
