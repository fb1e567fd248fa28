"""Comba against arXiv 2506.02475: decay, read with p, write what differs under k."""

import math

import torch

from deltarule.nn import RULES
from rules.drawn import HV, B, H, K, T, V, draw, draw_projections, each_head, largest_error, run


def drawn(**changes):
    gates = {"decay_logits": draw(B, T, HV), "A_log": draw(HV), "dt_bias": draw(HV)}
    others = {"beta_logits": draw(B, T, HV), "erase_scale": draw(H), "D": draw(H)}
    return draw_projections(**(gates | others | changes))


def test_token_loop():
    p = drawn()
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v, a, b in each_head(p.v, p.decay_logits, p.beta_logits):
        h = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            q, k = p.q[row, t, key_head], p.k[row, t, key_head]
            q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
            feedback = torch.sigmoid(p.erase_scale[key_head]) * k
            q = q - p.D[key_head] * feedback
            dt = torch.log(1 + torch.exp(a[t] + p.dt_bias[head]))
            h = torch.exp(-torch.exp(p.A_log[head]) * dt) * h
            h = h + torch.outer(k, torch.sigmoid(b[t]) * (v[t] - feedback @ h))
            expected[row, t, head] = q / math.sqrt(K) @ h
    assert largest_error(run(RULES["comba"], p), expected) <= 1e-12


def test_the_whole_key_and_no_correction_is_gated_deltanet():
    p = drawn(erase_scale=torch.full((H,), 1e3).double(), D=torch.zeros(H).double())
    assert largest_error(run(RULES["comba"], p), run(RULES["gated_deltanet"], p)) <= 1e-12
