"""RetNet against the parallel form of arXiv 2307.08621, eq. 5: (Q K^T * D) V, D_nm = g^(n-m)."""

import math

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, T, V, draw, draw_projections, each_head, largest_error, run
from oracles import gated_retention


def test_parallel_retention():
    p = draw_projections()
    expected = torch.zeros(B, T, HV, V, dtype=torch.float64)
    for row, head, key_head, v in each_head(p.v):
        gamma = 1 - 2.0 ** (-5 - head)
        powers = [[gamma ** (n - m) if n >= m else 0.0 for m in range(T)] for n in range(T)]
        decay = torch.tensor(powers, dtype=torch.float64)
        scores = p.q[row, :, key_head] @ p.k[row, :, key_head].T / math.sqrt(5)
        expected[row, :, head] = (scores * decay) @ v
    assert largest_error(run(RULES["retnet"], p), expected) <= 1e-12


def test_gated_retention_by_its_oracle():
    """arXiv 2405.05254, section 3.1: the decay of a head is the token's own."""
    p = draw_projections(decay_logits=draw(B, T, HV))
    expected = torch.zeros(B, T, HV, V, dtype=torch.float64)
    for row, head, key_head, v, logits in each_head(p.v, p.decay_logits):
        q, gamma = p.q[row, :, key_head] / math.sqrt(5), gated_retention.gate(logits)
        o, _ = gated_retention.recurrence(q, p.k[row, :, key_head], v, gamma)
        expected[row, :, head] = o
    assert largest_error(run(RULES["gated_retnet"], p), expected) <= 1e-12
