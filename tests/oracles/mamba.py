"""Mamba-1 (Gu & Dao 2023) and its signed form (Grazzi et al. 2024, arXiv 2411.12537, section 5).

    S_t = A_t * S_{t-1} + (Delta_t * v_t) k_t^T,    o_t = S_t q_t + d * v_t
    A_t = exp(-(Delta_t 1^T) * exp(A_log))          in (0, 1)
    A_t = 2 exp(-(Delta_t 1^T) * exp(A_log)) - 1    in (-1, 1), signed

Only the transition changes sign: the input keeps Delta_t, and no absolute value appears. k, q (B
and C in Mamba) are shared by all channels. As Delta -> 0 the signed transition still tends to 1.
"""

import torch


def transition(delta, A_log, signed):
    decay = torch.exp(-delta[:, None] * torch.exp(A_log))
    return 2 * decay - 1 if signed else decay


def recurrence(q, k, v, delta, A_log, d, signed=True):
    """q, k: (T, N); v, delta: (T, C), delta > 0; A_log: (C, N); d: (C,)."""
    S = torch.zeros_like(A_log)
    outputs = []
    for t in range(len(q)):
        S = transition(delta[t], A_log, signed) * S + torch.outer(delta[t] * v[t], k[t])
        outputs.append(S @ q[t] + d * v[t])
    return torch.stack(outputs), S
