"""Gated DeltaNet-2 against arXiv 2605.22791: S = (I - k (b * k)^T) D S + k (w * v)^T."""

import math

import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


def drawn(**changes):
    gates = {"decay_logits": draw(B, T, HV, K), "A_log": draw(HV), "dt_bias": draw(HV, K)}
    logits = {"erase_logits": draw(B, T, HV, K), "write_logits": draw(B, T, HV, V)}
    return draw_projections(**(gates | logits | changes))


def test_token_loop():
    p = drawn()
    expected = torch.zeros_like(p.v)
    gates = p.decay_logits, p.erase_logits, p.write_logits
    for row, head, key_head, v, a, b_logits, w_logits in each_head(p.v, *gates):
        S = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            q, k = p.q[row, t, key_head], p.k[row, t, key_head]
            q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
            dt = torch.log(1 + torch.exp(a[t] + p.dt_bias[head]))
            D = torch.diag(torch.exp(-torch.exp(p.A_log[head]) * dt))
            b, w = torch.sigmoid(b_logits[t]), torch.sigmoid(w_logits[t])
            erase = torch.eye(K, dtype=torch.float64) - torch.outer(k, b * k)
            S = erase @ D @ S + torch.outer(k, w * v[t])
            expected[row, t, head] = q / math.sqrt(K) @ S
    assert largest_error(run(RULES["gated_deltanet2"], p), expected) <= 1e-12


def test_one_strength_for_all_channels_is_kda():
    logits = draw(B, T, HV)
    erase, write = (logits.unsqueeze(-1).expand(B, T, HV, size) for size in (K, V))
    p = drawn(erase_logits=erase, write_logits=write, beta_logits=logits)
    assert largest_error(run(RULES["gated_deltanet2"], p), run(RULES["kda"], p)) <= 1e-12
