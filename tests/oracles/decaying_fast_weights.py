"""Decaying fast weights (Mao 2022, arXiv 2210.04243; Table 4 of seed 001; G_t of seeds 000, 004).

    S_t = (b_t a_t^T) * S_{t-1} + v_t k_t^T = Diag(b_t) S_{t-1} Diag(a_t) + v_t k_t^T
    o_t = S_t q_t

b_t acts on the V rows, a_t on the K columns. As masked products, with A, B the running products:
    o_t = B_t * sum_{j<=t} [(q_t * A_t) . (k_j / A_j)] (v_j / B_j).
The current token is not decayed.
"""

import torch


def recurrence(q, k, v, a, b, state=None):
    """q, k, a: (T, K); v, b: (T, V); state: (V, K)."""
    S = v.new_zeros(v.shape[1], k.shape[1]) if state is None else state
    outputs = []
    for t in range(len(q)):
        S = torch.outer(b[t], a[t]) * S + torch.outer(v[t], k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs), S


def masked_products(q, k, v, a, b):
    """No state: each pair (t, j) with its own product of decays, taken as exp of a difference."""
    log_a, log_b = a.log().cumsum(0), b.log().cumsum(0)
    outputs = []
    for t in range(len(q)):
        o = torch.zeros_like(v[0])
        for j in range(t + 1):
            score = (q[t] * torch.exp(log_a[t] - log_a[j])) @ k[j]
            o = o + score * torch.exp(log_b[t] - log_b[j]) * v[j]
        outputs.append(o)
    return torch.stack(outputs)


def factored(q, k, v, a, b):
    """The same as matrix products; safe for short sequences only (divides by running products)."""
    A, B = a.cumprod(0), b.cumprod(0)
    return B * (torch.tril((q * A) @ (k / A).T) @ (v / B))
