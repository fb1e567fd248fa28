"""mLSTM against arXiv 2405.04517, eq. 19 to 27, in its letters C, n, i, f, and without any m."""

from dataclasses import replace

import pytest
import torch

from deltarule.nn import RULES
from deltarule.nn.mlstm import gates, running_maximum
from deltarule.ops import delta_rule
from nn.drawn import HV, B, K, T, V, draw, draw_projections, each_head, largest_error, run

RULE = RULES["mlstm"]


def drawn(size=1.0):
    return draw_projections(decay_logits=size * draw(B, T, HV), beta_logits=size * draw(B, T, HV))


@pytest.mark.parametrize("size", [1.0, 5.0])
def test_token_loop_without_stabiliser(size):
    p = drawn(size)
    expected = torch.zeros_like(p.v)
    for row, head, key_head, v, f_logits, i_logits in each_head(p.v, p.decay_logits, p.beta_logits):
        C, n = torch.zeros(V, K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
        for t in range(T):
            q, k = p.q[row, t, key_head], p.k[row, t, key_head] / K**0.5
            f, i = torch.sigmoid(f_logits[t]), torch.exp(i_logits[t])
            C = f * C + i * torch.outer(v[t], k)
            n = f * n + i * k
            expected[row, t, head] = C @ q / torch.clamp((n @ q).abs(), min=1)
    assert largest_error(run(RULE, p), expected) <= 1e-12


def test_stabiliser_is_the_papers_running_maximum():
    p = drawn(3.0)
    log_f, log_i = gates(p)
    m, ms = torch.zeros(B, HV, dtype=torch.float64), []
    for t in range(T):
        m = torch.maximum(log_f[:, t] + m, log_i[:, t])
        ms.append(m)
    before, found = running_maximum(log_f, log_i, p, None)
    torch.testing.assert_close(found, torch.stack(ms, dim=1))
    torch.testing.assert_close(before[:, 1:], found[:, :-1])
    arguments, carry = RULE.arguments(p)
    torch.testing.assert_close(carry["stabilizer"], m)
    assert (arguments["log_decay"] <= 0).all()
    assert (arguments["v"].abs() <= torch.cat([p.v.abs(), torch.ones_like(p.v[..., :1])], -1)).all()


def test_survives_input_gates_that_overflow():
    p = drawn()
    huge = replace(p, beta_logits=p.beta_logits.float() + 200, **{
        name: getattr(p, name).float() for name in ("q", "k", "v", "decay_logits")
    })  # fmt: skip
    assert run(RULE, huge).isfinite().all()
    # Divided by |z^T q| rather than one, the read-out does not depend on a common factor.
    larger = replace(p, beta_logits=p.beta_logits + 200), replace(p, beta_logits=p.beta_logits + 90)
    torch.testing.assert_close(run(RULE, larger[0]), run(RULE, larger[1]))


def test_an_outlier_is_forgotten():
    """After one huge input gate and one forget gate that closes, small writes count again."""
    p = drawn()
    i, f = torch.zeros(B, T, HV).double(), torch.full((B, T, HV), 30.0).double()
    i[:, 0], f[:, 1] = 300.0, -400.0
    with_outlier = run(RULE, replace(p, beta_logits=i, decay_logits=f))
    i[:, 0] = -torch.inf
    torch.testing.assert_close(
        with_outlier[:, 1:], run(RULE, replace(p, beta_logits=i, decay_logits=f))[:, 1:]
    )


def test_gradients_see_through_the_stabiliser():
    p = drawn()
    names = ("q", "k", "v", "decay_logits", "beta_logits")
    inputs = [getattr(p, name)[:1, :4].clone().requires_grad_() for name in names]

    def output(*given):
        projections = replace(p, **dict(zip(names, given, strict=True)))
        arguments, _ = RULE.arguments(projections)
        return RULE.read_out_function(delta_rule(**arguments, impl="reference").o, projections)

    assert torch.autograd.gradcheck(output, inputs)
