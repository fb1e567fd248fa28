"""The mesa layer as recursive least squares: the inverse itself is carried, and nothing is solved.

P_t = P' - beta P' k k^T P' / (1 + beta k^T P' k)    P' = P_{t-1} / a_t    P_0 = Diag(1 / lambda)
S_t = S_{t-1} - beta (S_{t-1} k - v) k^T P_t         o_t = scale S_t q_t

K^2 operations a token, one token after another. Without a decay it is what `mesa` computes; with
one it forgets the regulariser, too, which is another model, and rounding in P grows with 1 / a.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.sequences import computed, per_value_head
from deltarule.shapes import Beta, Keys, Queries, Values


class Recursion(NamedTuple):
    """What `mesa_recursion` returns: o [B, T, HV, V], P [B, HV, K, K] and S [B, HV, V, K]."""

    o: Tensor
    inverse: Tensor
    state: Tensor


def mesa_recursion(
    q: Queries, k: Keys, v: Values, *, beta: Beta, regularizer: Tensor,
    log_decay: Tensor | None = None, scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
) -> Recursion:  # fmt: skip
    """Carry P and S along each row; differentiable to any order.

    Args:
        q: Queries [B, T, H, K].
        k: Keys [B, T, H, K].
        v: Values [B, T, HV, V]; HV is a multiple of H.
        beta: Weight of each token [B, T, HV], >= 0.
        regularizer: Lambda of each head and key channel [HV, K], > 0.
        log_decay: Natural log of the decay [HV] or [B, T, HV]. None means no decay.
        scale: Factor of the read-out. None means K ** -0.5.
        initial_state: P and S of an earlier call. None begins with Diag(1 / lambda) and zeros.

    Examples:
        >>> from deltarule import mesa
        >>> q, k, v = torch.randn(3, 1, 9, 2, 4, dtype=torch.float64).unbind()
        >>> given = {"beta": torch.rand(1, 9, 2).double(), "regularizer": torch.ones(2, 4).double()}
        >>> torch.allclose(mesa_recursion(q, k, v, **given).o, mesa(q, k, v, **given).o)
        True

    Source: arXiv 2309.05858, its appendix on recursive least squares.
    """
    heads = v.shape[2]
    q, k, values = per_value_head(q, heads), per_value_head(k, heads), computed(v)
    beta = computed(beta)[..., None, None]
    if initial_state is None:
        inverse = (1 / computed(regularizer)).diag_embed().expand(len(v), -1, -1, -1)
        initial_state = inverse, values.new_zeros(len(v), heads, v.shape[3], q.shape[3])
    P, S = initial_state
    grown = torch.ones_like(beta)
    if log_decay is not None:
        grown = torch.exp(-computed(log_decay)).expand(v.shape[:3])[..., None, None]
    outputs = []
    for t in range(v.shape[1]):
        key, value, weight = k[:, t].unsqueeze(-1), values[:, t].unsqueeze(-1), beta[:, t]
        P = P * grown[:, t]
        seen = P @ key
        P = P - weight * seen @ seen.mT / (1 + weight * key.mT @ seen)
        S = S - weight * (S @ key - value) @ (P @ key).mT
        outputs.append((S @ q[:, t].unsqueeze(-1)).squeeze(-1))
    o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(values)
    return Recursion((o * (q.shape[3] ** -0.5 if scale is None else scale)).to(v.dtype), P, S)
