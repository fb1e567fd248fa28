"""Mamba-2 against its state-space model: h = e^{dt A} h + dt B x, y = C h + D x."""

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def test_state_space_model():
    gates = {"decay_logits": draw(B, T, HV), "A_log": draw(HV), "dt_bias": draw(HV), "D": draw(HV)}
    p = draw_projections(**gates)
    expected = torch.zeros_like(p.v)
    for row, head, group, x, logits in each_head(p.v, p.decay_logits):
        A = -torch.exp(p.A_log[head])
        h = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            dt = torch.log(1 + torch.exp(logits[t] + p.dt_bias[head]))
            h = torch.exp(dt * A) * h + torch.outer(dt * p.k[row, t, group], x[t])
            expected[row, t, head] = p.q[row, t, group] @ h + p.D[head] * x[t]
    assert largest_error(run(RULES["mamba2"], p), expected) <= 1e-12
