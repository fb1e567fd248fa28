"""Gated DeltaNet against arXiv 2412.06464, eq. 10: S = S (alpha (I - beta k k^T)) + beta v k^T."""

import math

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def test_gated_delta_rule():
    gates = {"decay_logits": draw(B, T, HV), "A_log": draw(HV), "dt_bias": draw(HV)}
    p = draw_projections(beta_logits=draw(B, T, HV), **gates)
    expected = torch.zeros_like(p.v)
    eye = torch.eye(K, dtype=torch.float64)
    for row, head, key_head, v, a, b in each_head(p.v, p.decay_logits, p.beta_logits):
        S = torch.zeros(V, K, dtype=torch.float64)
        for t in range(T):
            q, k = p.q[row, t, key_head], p.k[row, t, key_head]
            q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
            beta = 1 / (1 + torch.exp(-b[t]))
            dt = torch.log(1 + torch.exp(a[t] + p.dt_bias[head]))
            alpha = torch.exp(-torch.exp(p.A_log[head]) * dt)
            S = S @ (alpha * (eye - beta * torch.outer(k, k))) + beta * torch.outer(v[t], k)
            expected[row, t, head] = S @ q / math.sqrt(K)
    assert largest_error(run(RULES["gated_deltanet"], p), expected) <= 1e-12
