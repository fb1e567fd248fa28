"""RWKV-6 against arXiv 2404.05892, section 4: read with the bonus u, then decay and write."""

import torch

from deltarule.nn import RULES
from deltarule.ops import delta_rule
from rules.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run

RULE = RULES["rwkv6"]


def by_hand(p):
    expected, states = torch.zeros_like(p.v), torch.zeros(B, HV, V, K, dtype=torch.float64)
    for row, head, _, v, logits in each_head(p.v, p.decay_logits):
        state = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            r, k = p.q[row, t, head], p.k[row, t, head]
            kv = torch.outer(k, v[t])
            expected[row, t, head] = r @ (state + p.bonus[head][:, None] * kv)
            state = torch.exp(-torch.exp(logits[t]))[:, None] * state + kv
        states[row, head] = state.T
    return expected, states


def test_token_loop_and_bonus():
    p = draw_projections(heads=HV, decay_logits=draw(B, T, HV, K), bonus=draw(HV, K))
    assert largest_error(run(RULE, p), by_hand(p)[0]) <= 1e-12


def test_the_state_holds_the_last_write():
    p = draw_projections(heads=HV, decay_logits=draw(B, T, HV, K), bonus=draw(HV, K))
    state = delta_rule(**RULE.arguments(p)[0]).final_state
    assert largest_error(RULE.final_state(state, p), by_hand(p)[1]) <= 1e-12


def test_bonus_weighs_keys_not_values():
    """001 Table 4 prints (d * v) k^T, which no longer is a read-out by k where K = V differs."""
    p = draw_projections(heads=HV, decay_logits=draw(B, T, HV, K), bonus=draw(HV, K))
    o = run(RULE, p)
    first = (p.q[:, 0] * p.bonus * p.k[:, 0]).sum(-1, keepdim=True) * p.v[:, 0]
    torch.testing.assert_close(o[:, 0], first)
