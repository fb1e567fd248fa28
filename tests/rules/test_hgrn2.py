"""HGRN-2 against arXiv 2404.07904, section 3: h = h Diag(f) + (1 - f) i^T."""

import math

import pytest
import torch

from deltarule.nn import RULES
from rules.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


@pytest.mark.parametrize("bounded", [False, True])
def test_outer_product_state_expansion(bounded):
    bound = torch.rand(HV, K, dtype=torch.float64) if bounded else None
    p = draw_projections(heads=HV, decay_logits=draw(B, T, HV, K), lower_bound=bound)
    expected = torch.zeros_like(p.v)
    for row, head, _, v, logits in each_head(p.v, p.decay_logits):
        h = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            least = bound[head] if bounded else 0.0
            f = least + (1 - least) / (1 + torch.exp(-logits[t]))
            h = f[:, None] * h + torch.outer(1 - f, v[t])
            expected[row, t, head] = p.q[row, t, head] / math.sqrt(K) @ h
    assert largest_error(run(RULES["hgrn2"], p), expected) <= 1e-12


def test_decay_never_falls_below_its_bound():
    bound = torch.rand(HV, K, dtype=torch.float64)
    logits = 1e3 * draw(B, T, HV, K)
    p = draw_projections(heads=HV, decay_logits=logits, lower_bound=bound)
    arguments, _ = RULES["hgrn2"].arguments(p)
    assert (arguments["log_decay"].exp() >= bound - 1e-12).all()
    torch.testing.assert_close(arguments["k"], 1 - arguments["log_decay"].exp())
