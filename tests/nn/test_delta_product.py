"""DeltaProduct against arXiv 2502.10297 in its letters: H = A(x) H + B(x), A and B written out."""

import math

import pytest
import torch

from deltarule.nn import RULES
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_product_of_householders(n, gated):
    gates = {"decay_logits": draw(B, T, HV), "A_log": draw(HV), "dt_bias": draw(HV)}
    p = draw_projections(n, beta_logits=draw(B, T * n, HV), beta_max=2.0, **gates)
    expected = torch.zeros(B, T, HV, V, dtype=torch.float64)
    for row, head, key_head, v, a, b in each_head(p.v, p.decay_logits, p.beta_logits):
        H = torch.zeros(K, V, dtype=torch.float64)
        for t in range(T):
            A, write = transition(p.k[row, t * n : t * n + n, key_head], v[t * n :], b[t * n :])
            dt = torch.log(1 + torch.exp(a[t] + p.dt_bias[head]))
            g = torch.exp(-torch.exp(p.A_log[head]) * dt) if gated else 1.0
            H = g * A @ H + write
            q = p.q[row, t, key_head]
            expected[row, t, head] = q / (q @ q + 1e-6).sqrt() @ H / math.sqrt(K)
    name = "gated_delta_product" if gated else "delta_product"
    assert largest_error(run(RULES[name], p), expected) <= 1e-12


def transition(keys, v, logits):
    """A = A_n ... A_1 and B = sum_j (A_n ... A_{j+1}) beta_j k_j v_j^T."""
    householders, writes = [], []
    for k, value, logit in zip(keys, v, logits, strict=False):
        k = k / (k @ k + 1e-6).sqrt()
        beta = 2 / (1 + torch.exp(-logit))
        householders.append(torch.eye(K, dtype=torch.float64) - beta * torch.outer(k, k))
        writes.append(beta * torch.outer(k, value))
    A, B = torch.eye(K, dtype=torch.float64), torch.zeros(K, V, dtype=torch.float64)
    for householder, write in zip(reversed(householders), reversed(writes), strict=True):
        A, B = A @ householder, B + A @ write
    return A, B
