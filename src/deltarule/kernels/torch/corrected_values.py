"""What each row writes once the rows before it have written: a unit lower triangular system.

    X = (I - L)^-1 (F + E S^T) = x0 + from_state S^T

With a tied erase  L_ij = -beta_i k_i.k_j,  F = beta v,            E = -beta k start.
With a free erase  L_ij = a_i.b_j,          F = (a_i.k_j) v,       E = a start_before.
The inverse is by substitution: exact to rounding for any keys, where a power series is not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.kernels.torch.decay import Decay, add_between, scale, scale_backward
from deltarule.kernels.torch.pair_scores import (
    own_scores_backward,
    pair_scores,
    pair_scores_backward,
)


class Corrected(NamedTuple):
    """X = x0 + from_state S^T for the chunks of a slab, and what the backward needs of them."""

    x0: Tensor  # [M, H, G, R, V]
    from_state: Tensor  # [M, H, G, R, K]
    inverse: Tensor  # (I - L)^-1 [M, H, G, R, R]
    scores: Tensor  # k against k where tied, a against b where free
    values: Tensor  # the same where tied, a against k where free
    scaled: Tensor  # k or a under the decay from the chunk's start


def tied(k: Tensor, v: Tensor, beta: Tensor, decay: Decay) -> Corrected:
    """k [M, H, 1, R, K], v [M, H, G, R, V], beta [M, H, G, R, 1]."""
    scores = pair_scores(k, k, decay.between, strict=True)
    inverse = _inverse(beta * scores)
    scaled = scale(k, decay.start)
    weighted = inverse * beta.mT
    from_state = (weighted @ scaled).neg_()
    return Corrected(weighted @ v, from_state, inverse, scores, scores, scaled)


def tied_backward(
    dx: Tensor, x: Tensor, state: Tensor, chunk: Corrected,
    k: Tensor, v: Tensor, beta: Tensor, decay: Decay,
) -> tuple[Tensor, Tensor, Tensor, Decay]:  # fmt: skip
    """Gradients by k, v, beta and the decay's exponents, given dx by the corrected values x.

    With dF = (I - L)^-T dX: dv = beta dF, and dbeta_i = dF_i . (v - S k start - sum_j L'_ij x_j)_i
    for the scores L' of k against k, so that beta = 0 needs no division.
    """
    d_values = chunk.inverse.mT @ dx
    by_state, by_scores = d_values @ state, d_values @ x.mT
    d_beta = (d_values * v).sum(-1, keepdim=True)
    d_beta -= (by_state * chunk.scaled).sum(-1, keepdim=True)
    d_beta -= (by_scores * chunk.scores).sum(-1, keepdim=True)
    dk_scores, d_between = own_scores_backward(
        by_scores.mul_(-beta), chunk.scores, k, decay.between
    )
    dk, d_start = scale_backward(by_state.mul_(-beta), chunk.scaled, k, decay.start)
    d_decay = Decay(start=d_start, between=d_between)
    return dk.add_(dk_scores), beta * d_values, d_beta, d_decay


def free(a: Tensor, b: Tensor, k: Tensor, v: Tensor, decay: Decay) -> Corrected:
    """a and b [M, H, G, R, K], k [M, H, 1, R, K], v [M, H, G, R, V]."""
    scores = pair_scores(a, b, decay.between_before, strict=True)
    values = pair_scores(a, k, decay.between_before, strict=True)
    inverse = _inverse(-scores)
    scaled = scale(a, decay.start_before)
    return Corrected(inverse @ (values @ v), inverse @ scaled, inverse, scores, values, scaled)


def free_backward(
    dx: Tensor, x: Tensor, state: Tensor, chunk: Corrected,
    a: Tensor, b: Tensor, k: Tensor, v: Tensor, decay: Decay,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Decay]:  # fmt: skip
    """Gradients by a, b, k, v and the decay's exponents, given dx by the corrected values x."""
    d_values = chunk.inverse.mT @ dx
    da, db, d_between = pair_scores_backward(
        d_values @ x.mT, chunk.scores, a, b, decay.between_before, strict=True
    )
    da_values, dk, d_between_values = pair_scores_backward(
        d_values @ v.mT, chunk.values, a, k, decay.between_before, strict=True
    )
    da_start, d_start = scale_backward(d_values @ state, chunk.scaled, a, decay.start_before)
    d_decay = Decay(start_before=d_start, between_before=add_between(d_between, d_between_values))
    return da.add_(da_values).add_(da_start), db, dk, chunk.values.mT @ d_values, d_decay


def _inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for a strictly lower triangular matrix."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(
        lower, identity.expand_as(lower), upper=False, unitriangular=True
    )
