"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eqs. 14-15, 34), angles in float64.

    theta_i = base^(-2 i / d), i = 0 .. d/2 - 1;   the pair i is turned by position * theta_i.

Pairs are (2i, 2i + 1) in the paper ("interleaved"), (i, i + d/2) in Llama and its kin ("halves").
RetNet's released code is interleaved with theta_i = 10000^(-i / (d/2 - 1)): its exponents run over
linspace(0, 1, d/2), so the last pair has 10000^-1 exactly. In float32 an angle is off by up to
about 1e-7 of itself: hundredths of a radian for the fast pairs at a million tokens.
"""

import torch


def frequencies(dim, base=10000.0):
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def rotate(x, positions, theta):
    """x: (T, D); positions: (T,); theta: (R,) turns the first 2 R channels, the rest pass."""
    turned = 2 * len(theta)
    y = x.to(torch.float64).clone()
    for t in range(len(x)):
        for i in range(len(theta)):
            a, b = i, i + turned // 2
            angle = positions[t].to(torch.float64) * theta[i]
            y[t, a] = x[t, a] * torch.cos(angle) - x[t, b] * torch.sin(angle)
            y[t, b] = x[t, a] * torch.sin(angle) + x[t, b] * torch.cos(angle)
    return y
