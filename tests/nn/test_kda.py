"""Kimi Delta Attention against arXiv 2510.26692, eq. 1, in its transposed letters."""

import math

import pytest
import torch

from deltarule.nn import KDA, RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run
from oracles import kda as oracle


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


def test_a_decay_with_a_lower_bound_follows_the_oracle():
    gates = {"decay_logits": draw(B, T, HV, K), "A_log": draw(HV), "dt_bias": draw(HV, K)}
    p = draw_projections(beta_logits=draw(B, T, HV), **gates, gate_lower_bound=-5.0)
    found = run(RULES["kda"], p)
    for row, head, key_head, v, logits, b in each_head(p.v, p.decay_logits, p.beta_logits):
        log_a = oracle.bounded_log_decay(logits, p.A_log[head], p.dt_bias[head], -5.0)
        q, k = (
            x[row, :, key_head] / (x[row, :, key_head].square().sum(-1, True) + 1e-6).sqrt()
            for x in (p.q, p.k)
        )
        expected, _ = oracle.recurrence(q / math.sqrt(K), k, v, log_a, b.sigmoid())
        assert largest_error(found[row, :, head], expected) <= 1e-12


def test_steps_of_a_bounded_decay_are_the_whole():
    torch.manual_seed(0)
    layer = KDA(32, num_heads=2, gate_lower_bound=-5.0)
    assert layer.A_log.tolist() == [0.0, 0.0]
    x, state, steps = torch.randn(1, 20, 32), None, []
    with torch.no_grad():
        whole = layer(x)[0]
        for t in range(20):
            y, state = layer(x[:, t : t + 1], state)
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_lower_bound": 0.0}, "gate_lower_bound must be None or a finite number < 0"),
        ({"gate_lower_bound": -5.0, "longest_horizon": 64.0}, "longest_horizon must be None with"),
    ],
)
def test_bounds_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        KDA(32, num_heads=2, **options)
