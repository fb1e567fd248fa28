"""RWKV-4's WKV (Peng et al. 2023, arXiv 2305.13048; the stable form of its appendix and release).

    wkv_t = (sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t)
          / (sum_{i<t} e^{-(t-1-i) w + k_i}     + e^{u + k_t})

per channel, w > 0, u the bonus of the current token; token t - 1 is not decayed when t reads it.
o_t = sigmoid(r_t) wkv_t. The kernel's parameter is -w = -exp(time_decay): ADDED to the exponent.
"""

import torch


def recurrence(k, v, w, u):
    """k, v: (T, C); w, u: (C,). The state is both sums, each times exp(-m), and m."""
    a, b, m = torch.zeros_like(w), torch.zeros_like(w), torch.full_like(w, -torch.inf)
    outputs = []
    for t in range(len(k)):
        top = torch.maximum(m, u + k[t])
        old, new = torch.exp(m - top), torch.exp(u + k[t] - top)
        outputs.append((old * a + new * v[t]) / (old * b + new))
        top = torch.maximum(m - w, k[t])
        old, new = torch.exp(m - w - top), torch.exp(k[t] - top)
        a, b, m = old * a + new * v[t], old * b + new, top
    return torch.stack(outputs), (a, b, m)
