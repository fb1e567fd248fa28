"""Lightning Attention against its token loop, with slopes 8 h / H (1 - layer / layers)."""

import math

import pytest
import torch

from deltarule.nn import RULES
from nn.drawn import HV, K, T, V, draw_projections, each_head, largest_error, run


@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (3, 12), (11, 12)])
def test_token_loop(layer, layers):
    p = draw_projections(depth=layer / layers)
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v in each_head(p.v):
        slope = 8 * head / HV * (1 - layer / layers)
        kv = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            kv = math.exp(-slope) * kv + torch.outer(p.k[row, t, key_head], v[t])
            expected[row, t, head] = p.q[row, t, key_head] / math.sqrt(K) @ kv
    assert largest_error(run(RULES["lightning"], p), expected) <= 1e-12


def test_first_head_never_forgets_and_the_last_forgets_fastest():
    arguments, _ = RULES["lightning"].arguments(draw_projections())
    assert arguments["log_decay"].tolist() == [0, -2, -4, -6]
