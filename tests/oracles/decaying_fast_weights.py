"""Decaying fast weights (Mao 2022, arXiv 2210.04243; Table 4 of seed 001; G_t of seeds 000, 004).

    S_t = (b_t a_t^T) * S_{t-1} + v_t k_t^T = Diag(b_t) S_{t-1} Diag(a_t) + v_t k_t^T
    o_t = S_t q_t

b_t acts on the V rows, a_t on the K columns. The current token is not decayed.
"""

import torch


def recurrence(q, k, v, a, b):
    """q, k, a: (T, K); v, b: (T, V)."""
    S = v.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        S = torch.outer(b[t], a[t]) * S + torch.outer(v[t], k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs), S
