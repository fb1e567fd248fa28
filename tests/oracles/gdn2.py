"""Gated DeltaNet 2 (NVlabs 2026; released recurrence).

    S_t = S_{t-1} Diag(a_t) (I - (b_t * k_t) k_t^T) + (w_t * v_t) k_t^T,   o_t = S_t q_t

Erase gate b_t per key channel, write gate w_t per value channel. The gate b sits on the key that
READS the decayed state, not on the one that writes: S a - (S a (b * k)) k^T. b = w = beta: KDA.
"""

import torch


def recurrence(q, k, v, log_a, b, w):
    """q, k, log_a, b: (T, K); v, w: (T, V)."""
    S = v.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        S = S * torch.exp(log_a[t])
        S = S + torch.outer(w[t] * v[t] - S @ (b[t] * k[t]), k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs), S
