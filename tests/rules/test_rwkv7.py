"""RWKV-7 against arXiv 2503.14456: wkv = wkv (Diag(w) - kk^T (a * kk)) + v^T k, in its letters."""

import math

import torch

from deltarule.nn import RULES
from rules.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def test_token_loop_and_bonus():
    p = draw_projections(
        heads=HV,
        decay_logits=draw(B, T, HV, K),
        erase_logits=draw(B, T, HV, K),
        erase_scale=draw(HV, K),
        replace_scale=draw(HV, K),
        bonus=draw(HV, K),
    )
    expected = torch.zeros_like(p.v)
    for row, head, _, v, w_logits, a_logits in each_head(p.v, p.decay_logits, p.erase_logits):
        state = torch.zeros(V, K, dtype=torch.float64)
        for t in range(T):
            r, k = p.q[row, t, head], p.k[row, t, head]
            # The authors' w = -softplus(-x) - 0.5, decay = exp(-exp(w)).
            w = -torch.log(1 + torch.exp(-w_logits[t])) - 0.5
            decay = torch.exp(-torch.exp(w))
            a = 1 / (1 + torch.exp(-a_logits[t]))
            kk = k * p.erase_scale[head]
            kk = kk / math.sqrt(kk @ kk)
            k = k * (1 + (a - 1) * p.replace_scale[head])
            state = (
                state * decay[None, :]
                - (state @ kk)[:, None] * (kk * a)[None, :]
                + v[t][:, None] * k[None, :]
            )
            bonus = (r * k * p.bonus[head]).sum() * v[t]
            expected[row, t, head] = state @ r + bonus
    assert largest_error(run(RULES["rwkv7"], p), expected) <= 1e-12
