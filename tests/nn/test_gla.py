"""Gated Linear Attention against arXiv 2312.06635, eq. 3: S = (alpha^T 1) * S + k^T v, o = q S."""

import math

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def test_token_loop():
    p = draw_projections(decay_logits=draw(B, T, HV, K))
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v, logits in each_head(p.v, p.decay_logits):
        S = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            alpha = (1 / (1 + torch.exp(-logits[t]))) ** (1 / 16)
            S = alpha[:, None] * S + p.k[row, t, key_head][:, None] * v[t][None, :]
            expected[row, t, head] = p.q[row, t, key_head] / math.sqrt(K) @ S
    assert largest_error(run(RULES["gla"], p), expected) <= 1e-12
