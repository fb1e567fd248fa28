r"""Weights, not trained, with which one layer multiplies the elements of a group exactly.

A group acts on a row vector by orthogonal matrices M(g), M(a) M(b) = M(a b). An orthogonal matrix
is a product of as many reflections as it has eigenvalues other than 1, and with unit keys, beta = 2
and v = 0 every write of the delta rule is one reflection:

    S_t = S_{t-1} (I - 2 k_1 k_1^T) ... (I - 2 k_n k_n^T) = S_{t-1} M(g_t)        n = n_steps

The token that begins a row writes a vector that every element moves elsewhere, so that the state
tells the product. Permutation matrices need n - 1 reflections in S_n, the swaps of two things;
S_4 and A_5 are also the rotations of the cube and of the icosahedron, and need two.

Source: DeltaProduct (arXiv 2502.10297), theorem 1 and its proof.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deltarule import delta_rule
from deltarule.ops.dispatch import Impl
from deltarule.tasks.batch import Array
from deltarule.tasks.groups import Group, elements, products, running_products

Matrix = NDArray[np.float64]
Action = Literal["permutations", "rotations"]

# In each group a cycle of all n things, and an element of order 2 with which it makes one of order
# 3. The three orders define the group, and its rotations likewise.
TRIANGLES: dict[str, tuple[Array, Array]] = {
    "S_4": (np.array([1, 2, 3, 0]), np.array([1, 0, 2, 3])),
    "A_5": (np.array([1, 2, 3, 4, 0]), np.array([1, 0, 3, 2, 4])),
}


def rotation_matrices(group: Group) -> Matrix:
    """The rotations of the cube (S_4) or of the icosahedron (A_5), [order, 3, 3].

    A turn by 2 pi / n about one axis and a half turn about another make a turn by 2 pi / 3 if the
    cosine between the axes is 1 / (2 sin(pi / n)).
    """
    cycle, swap = (int((elements(group) == p).all(axis=1).argmax()) for p in TRIANGLES[group])
    angle = 2 * np.pi / elements(group).shape[1]
    cosine = 1 / (2 * np.sin(angle / 2))
    axis = np.array([np.sqrt(1 - cosine**2), 0, cosine])
    x, y = np.cos(angle), np.sin(angle)
    turn = np.array([[x, -y, 0], [y, x, 0], [0, 0, 1]])
    return spread(group, {cycle: turn, swap: 2 * np.outer(axis, axis) - np.eye(3)})


def spread(group: Group, generators: dict[int, Matrix]) -> Matrix:
    """The matrix of every element, from those of elements that generate the group."""
    table, found = products(group), {0: np.eye(3)}
    waiting = [0]
    while waiting:
        element = waiting.pop(0)
        for generator, matrix in generators.items():
            product = int(table[element, generator])
            if product not in found:
                found[product] = found[element] @ matrix
                waiting.append(product)
    return np.stack([found[element] for element in sorted(found)])


def reflections(matrix: Matrix) -> list[Matrix]:
    """Unit vectors whose reflections, first on the left, make an orthogonal matrix.

    The reflection along M v - v takes M v back to v and leaves alone what M left alone, so that
    each vector of a basis needs one at most.
    """
    keys = []
    for index in range(len(matrix)):
        moved = matrix[:, index] - np.eye(len(matrix))[index]
        length = np.linalg.norm(moved)
        if length > 1e-9:
            keys.append(moved / length)
            matrix = matrix - 2 * np.outer(keys[-1], keys[-1] @ matrix)
    return keys


class Run(NamedTuple):
    """The element that the state is nearest to, after each token; and how far it was at the most.

    That is from the exact vector, whose length is 1.
    """

    products: Array
    error: float


@dataclass(frozen=True)
class Construction:
    """Keys and write strengths for each element of a group."""

    group: Group
    action: Action

    @cached_property
    def matrices(self) -> Matrix:
        """M(g) of every element; of permutations (x M(p))[i] = x[p[i]], [order, n, n]."""
        if self.action == "rotations":
            return rotation_matrices(self.group)
        moved = elements(self.group)
        return np.eye(moved.shape[1])[:, moved].transpose(1, 0, 2)

    @cached_property
    def reflections(self) -> list[list[Matrix]]:
        return [reflections(matrix) for matrix in self.matrices]

    @property
    def n_steps(self) -> int:
        return max(map(len, self.reflections))

    @property
    def orbit(self) -> Matrix:
        """Images of the vector that the first token writes, under each element: [order, K]."""
        size = self.matrices.shape[1]
        # Far from all that an element of these groups leaves in place.
        first = np.arange(size) - 0.45 * size
        return first / np.linalg.norm(first) @ self.matrices

    def weights(self) -> tuple[Matrix, Matrix]:
        """Keys [order, n_steps, K] and betas [order, n_steps]; a step left over has none."""
        keys = np.zeros((len(self.matrices), self.n_steps, self.matrices.shape[1]))
        for element, made in enumerate(self.reflections):
            keys[element, : len(made)] = np.reshape(made, (-1, keys.shape[2]))
        betas: Matrix = np.where(keys.any(axis=2), 2.0, 0.0)
        return keys, betas

    def states(self, words: Array, impl: Impl) -> Matrix:
        """The state after each element, [T, K], from `delta_rule` in float64."""
        keys, beta = (x[words] for x in self.weights())
        steps, size = keys.shape[1:]
        # The token before them all writes 1 along the first key.
        keys, beta = (np.concatenate([np.zeros_like(x[:1]), x]) for x in (keys, beta))
        keys[0, 0], beta[0, 0] = self.orbit[0], 1
        k, strength = (torch.from_numpy(x.reshape(1, -1, *x.shape[2:])) for x in (keys, beta))
        v = torch.zeros(1, len(keys) * steps, size, 1, dtype=torch.float64)
        v[:, 0] = 1
        # As many heads as channels hold the same state, and each reads one channel.
        q = torch.eye(size, dtype=torch.float64).expand(1, len(keys), size, size)
        k, strength = (x.unsqueeze(2).expand(-1, -1, size, *x.shape[2:]) for x in (k, strength))
        o = delta_rule(q, k, v, beta=strength, n_steps=steps, scale=1.0, impl=impl).o
        return o[0, 1:, :, 0].numpy()

    def run(self, words: Array, impl: Impl = "auto") -> Run:
        """Multiply elements by their numbers, [T]: the products so far, and the largest error."""
        distances = np.linalg.norm(self.states(words, impl)[:, None] - self.orbit, axis=-1)
        exact = running_products(self.group, words[None])[0]
        error = np.take_along_axis(distances, exact[:, None], axis=1).max()
        return Run(distances.argmin(axis=1), float(error))
