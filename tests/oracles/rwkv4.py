"""RWKV-4's WKV (Peng et al. 2023, arXiv 2305.13048; the stable form of its appendix and release).

    wkv_t = (sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t)
          / (sum_{i<t} e^{-(t-1-i) w + k_i}     + e^{u + k_t})

per channel, w > 0, u the bonus of the current token; token t - 1 is not decayed when t reads it.
o_t = sigmoid(r_t) wkv_t. The kernel's parameter is -w = -exp(time_decay): ADDED to the exponent.
"""

import torch


def recurrence(k, v, w, u, state=None):
    """k, v: (T, C); w, u: (C,); state: numerator and denominator, both times exp(-m), and m."""
    a, b = torch.zeros_like(w), torch.zeros_like(w)
    m = torch.full_like(w, -torch.inf)
    if state is not None:
        a, b, m = state
    outputs = []
    for t in range(len(k)):
        top = torch.maximum(m, u + k[t])
        old, new = torch.exp(m - top), torch.exp(u + k[t] - top)
        outputs.append((old * a + new * v[t]) / (old * b + new))
        top = torch.maximum(m - w, k[t])
        old, new = torch.exp(m - w - top), torch.exp(k[t] - top)
        a, b, m = old * a + new * v[t], old * b + new, top
    return torch.stack(outputs), (a, b, m)


def by_definition(k, v, w, u):
    """The equation, summed anew for every token, without the maximum."""
    outputs = []
    for t in range(len(k)):
        age = torch.arange(t - 1, -1, -1, dtype=k.dtype)[:, None]
        weights = torch.cat([torch.exp(-age * w + k[:t]), torch.exp(u + k[t])[None]])
        outputs.append((weights * v[: t + 1]).sum(0) / weights.sum(0))
    return torch.stack(outputs)
