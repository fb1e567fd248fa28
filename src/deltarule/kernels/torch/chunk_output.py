"""What the queries of a chunk read: from the state at its start, and from the writes inside it.

O = (q start) S^T + sum over writes of P X        P_ij = q_i.y_j between_ij, j <= i
"""

from typing import NamedTuple

from torch import Tensor

from deltarule.kernels.torch.decay import Between, Decay, add_between, scale, scale_backward
from deltarule.kernels.torch.pair_scores import pair_scores, pair_scores_backward


class Queries(NamedTuple):
    """Queries decayed from the chunk's start, and their scores against the keys of each write."""

    scaled: Tensor
    scores: list[Tensor]


def queries(q: Tensor, keys: list[Tensor], decay: Decay) -> Queries:
    """q [M, H, 1, C, K], keys [M, H, 1 or G, C*n, K]."""
    scores = [pair_scores(q, y, decay.between, strict=False) for y in keys]
    return Queries(scale(q, decay.start), scores)


def chunk_output(chunk: Queries, states: Tensor, values: list[Tensor]) -> Tensor:
    """States [M, H, G, V, K], values X [M, H, G, C*n, V] -> o [M, H, G, C, V]."""
    o = chunk.scaled @ states.mT
    for scores, x in zip(chunk.scores, values, strict=True):
        o += scores @ x
    return o


def chunk_output_backward(chunk: Queries, d_o: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients by the values X of each write, and by the states."""
    return [scores.mT @ d_o for scores in chunk.scores], d_o.mT @ chunk.scaled


def queries_backward(
    d_o: Tensor,
    states: Tensor,
    values: list[Tensor],
    chunk: Queries,
    q: Tensor,
    keys: list[Tensor],
    decay: Decay,
) -> tuple[Tensor, list[Tensor], Decay]:
    """Gradients by q, the keys of each write, and the decay's exponents."""
    dq, d_start = scale_backward(d_o @ states, chunk.scaled, q, decay.start)
    d_keys: list[Tensor] = []
    d_between: Between | None = None
    for x, y, scores in zip(values, keys, chunk.scores, strict=True):
        dq_pairs, dy, d_pairs = pair_scores_backward(
            d_o @ x.mT, scores, q, y, decay.between, strict=False
        )
        dq = dq + dq_pairs
        d_keys.append(dy)
        d_between = add_between(d_between, d_pairs)
    return dq, d_keys, Decay(start=d_start, between=d_between)
