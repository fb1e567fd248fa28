"""Linear attention against the sum over all pairs that its paper starts from."""

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, T, V, draw_projections, each_head, largest_error, run


def test_is_attention_without_softmax():
    p = draw_projections()
    expected = torch.zeros(B, T, HV, V, dtype=torch.float64)
    for row, head, key_head, v in each_head(p.v):
        for t in range(T):
            for j in range(t + 1):
                similarity = p.q[row, t, key_head] @ p.k[row, j, key_head] / 5**0.5
                expected[row, t, head] += similarity * v[j]
    assert largest_error(run(RULES["linear_attention"], p), expected) <= 1e-12
