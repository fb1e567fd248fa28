"""The definition of `mesa`: a ridge regression over all tokens so far, solved for every query.

    H_t = g_t H_{t-1} + beta_t k_t k_t^T        G_t = g_t G_{t-1} + beta_t v_t k_t^T
    o_t = scale * G_t (H_t + Diag(regularizer))^{-1} q_t        g_t = exp(log_decay_t)

S_t = G_t (H_t + Diag(regularizer))^{-1} minimises
sum_i (g_{i+1} .. g_t) beta_i |S k_i - v_i|^2 + tr(S Diag(regularizer) S^T).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.sequences import computed, per_value_head, sequences_of, stack_rows
from deltarule.shapes import MesaOutput, MesaState


def mesa(given: Mapping[str, Any]) -> MesaOutput:
    """Run along each sequence, token by token; `iterations` of None solves exactly."""
    q, k, v, beta, log_decay = (given[name] for name in ("q", "k", "v", "beta", "log_decay"))
    heads, initial_state = v.shape[2], given["initial_state"]
    q, k, values = per_value_head(q, heads), per_value_head(k, heads), computed(v)
    ridge = computed(given["regularizer"], v).diag_embed()
    beta = computed(beta, v)[..., None, None]
    decay = torch.ones_like(beta)
    if log_decay is not None:
        decay = computed(log_decay, v).exp().expand(beta.shape[:3])[..., None, None]
    spans = sequences_of(q, given["cu_seqlens"])
    finals, rows = [], [list[Tensor]() for _ in range(q.shape[0])]
    for (row, start, end), H, G in zip(spans, *initial_state, strict=True):
        for t in range(start, end):
            key, value = k[row, t].unsqueeze(-1), values[row, t].unsqueeze(-1)
            H = decay[row, t] * H + beta[row, t] * key @ key.mT
            G = decay[row, t] * G + beta[row, t] * value @ key.mT
            x = solve(H + ridge, q[row, t].unsqueeze(-1), given["iterations"])
            rows[row].append((G @ x).squeeze(-1))
        finals.append(MesaState(H, G))
    o = stack_rows(rows, values) * given["scale"]
    if not finals:
        return MesaOutput(o.to(v.dtype), initial_state)
    final = MesaState(*(torch.stack(parts) for parts in zip(*finals, strict=True)))
    return MesaOutput(o.to(v.dtype), final)


def solve(A: Tensor, b: Tensor, iterations: int | None) -> Tensor:
    """x of A x = b, for symmetric positive definite A: exactly, or so many steps towards it.

    Conjugate gradients from x = 0: r = b - A x is orthogonal to all directions p before, which
    are orthogonal to each other under A.
    """
    if iterations is None:
        return torch.linalg.solve_ex(A, b).result
    x, r, p = torch.zeros_like(b), b, b
    for _ in range(iterations):
        size = (r.mT @ r).clamp(min=torch.finfo(r.dtype).tiny)
        step = (r.mT @ r) / (p.mT @ A @ p).clamp(min=torch.finfo(r.dtype).tiny)
        x, r = x + step * p, r - step * (A @ p)
        p = r + (r.mT @ r) / size * p
    return x
