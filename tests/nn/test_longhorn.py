"""Longhorn against its objective, minimised by a linear solve: |S - S'|^2 + b |S k - v|^2."""

import math

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def test_minimises_its_objective():
    p = draw_projections(beta_logits=draw(B, T, HV))
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v, logits in each_head(p.v, p.beta_logits):
        S = torch.zeros(V, K, dtype=torch.float64)
        for t in range(T):
            q, k = p.q[row, t, key_head], p.k[row, t, key_head]
            b = 1 / (1 + torch.exp(-logits[t]))
            # The gradient is zero where S (I + b k k^T) = S' + b v k^T.
            left = torch.eye(K, dtype=torch.float64) + b * torch.outer(k, k)
            S = torch.linalg.solve(left, S + b * torch.outer(v[t], k), left=False)
            expected[row, t, head] = S @ q / math.sqrt(K)
    assert largest_error(run(RULES["longhorn"], p), expected) <= 1e-12


def test_transition_never_flips_a_sign():
    p = draw_projections(beta_logits=1e4 * draw(B, T, HV), beta_max=2.0)
    beta = RULES["longhorn"].arguments(p)[0]["beta"]
    erased = beta * p.k.square().sum(-1).repeat_interleave(HV // 2, dim=2)
    assert (erased >= 0).all()
    assert (erased < 1).all()
