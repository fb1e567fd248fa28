"""Kimi Delta Attention against arXiv 2510.26692, eq. 1, in its transposed letters."""

import math

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def test_token_loop():
    gates = {"decay_logits": draw(B, T, HV, K), "A_log": draw(HV), "dt_bias": draw(HV, K)}
    p = draw_projections(beta_logits=draw(B, T, HV), **gates)
    expected = torch.zeros_like(p.v)
    eye = torch.eye(K, dtype=torch.float64)
    for row, head, key_head, v, a, b in each_head(p.v, p.decay_logits, p.beta_logits):
        S = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            q, k = p.q[row, t, key_head], p.k[row, t, key_head]
            q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
            beta = 1 / (1 + torch.exp(-b[t]))
            dt = torch.log(1 + torch.exp(a[t] + p.dt_bias[head]))
            alpha = torch.exp(-torch.exp(p.A_log[head]) * dt)
            erase = eye - beta * torch.outer(k, k)
            S = erase @ torch.diag(alpha) @ S + beta * torch.outer(k, v[t])
            expected[row, t, head] = S.T @ q / math.sqrt(K)
    assert largest_error(run(RULES["kda"], p), expected) <= 1e-12
