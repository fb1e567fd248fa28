"""Gated RFA against arXiv 2103.02143, section 3.2: two gated sums, divided."""

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def test_gated_sums():
    p = draw_projections(decay_logits=draw(B, T, HV))
    # Positive features, so that no divisor is near zero.
    p.q.abs_()
    p.k.abs_()
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v, logits in each_head(p.v, p.decay_logits):
        S, z = torch.zeros(K, V, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
        for t in range(T):
            q, k = p.q[row, t, key_head], p.k[row, t, key_head]
            g = 1 / (1 + torch.exp(-logits[t]))
            S = g * S + (1 - g) * torch.outer(k, v[t])
            z = g * z + (1 - g) * k
            expected[row, t, head] = q @ S / (q @ z)
    assert largest_error(run(RULES["gated_rfa"], p), expected) <= 1e-12


def test_is_a_weighted_mean_of_values():
    p = draw_projections(decay_logits=draw(B, T, HV))
    p.q.abs_()
    p.k.abs_()
    p.v.fill_(3.0)
    o = run(RULES["gated_rfa"], p)
    torch.testing.assert_close(o, torch.full_like(o, 3.0))
