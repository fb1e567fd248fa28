"""DeltaNet against arXiv 2406.06484, section 2.2: retrieve the old value, blend, replace."""

import math

import pytest
import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def unit(x):
    return x / torch.sqrt((x * x).sum() + 1e-6)


@pytest.mark.parametrize("beta_max", [1.0, 2.0])
def test_retrieve_blend_replace(beta_max):
    p = draw_projections(beta_logits=draw(B, T, HV), beta_max=beta_max)
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v, logits in each_head(p.v, p.beta_logits):
        S = torch.zeros(V, K, dtype=torch.float64)
        for t in range(T):
            q, k = unit(p.q[row, t, key_head]), unit(p.k[row, t, key_head])
            beta = beta_max / (1 + torch.exp(-logits[t]))
            v_old = S @ k
            v_new = beta * v[t] + (1 - beta) * v_old
            S = S - torch.outer(v_old, k) + torch.outer(v_new, k)
            expected[row, t, head] = S @ q / math.sqrt(K)
    assert largest_error(run(RULES["deltanet"], p), expected) <= 1e-12
