"""mLSTM against arXiv 2405.04517, eq. 19 to 27, with the eps of its release, and without any m."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from deltarule.nn import MLSTM, RULES
from deltarule.nn.linears import ExactLinear
from nn.layers import HV, B, T, draw, draw_projections, largest_error, run
from nn.test_recurrences import RECURRENCES, by_hand
from tolerance import relative_rms

RULE = RULES["mlstm"]


def drawn():
    return draw_projections(decay_logits=draw(B, T, HV), beta_logits=draw(B, T, HV))


@pytest.mark.parametrize("gate", [80.0, 104.0, 300.0])
def test_a_query_that_meets_no_key_reads_zero(gate):
    p = drawn()
    # Positive, so that the divisor of no other query is near zero, whatever is drawn.
    p = replace(p, beta_logits=p.beta_logits + gate, q=p.q.abs(), k=p.k.abs())
    p = replace(p, q=p.q.index_fill(1, torch.tensor([3]), 0.0))
    names = ("q", "k", "v", "decay_logits", "beta_logits")
    single = replace(p, **{name: getattr(p, name).float().requires_grad_() for name in names})
    o = run(RULE, single)
    assert (o[:, 3] == 0).all()
    o.sum().backward()
    assert all(getattr(single, name).grad.isfinite().all() for name in names)
    expected = by_hand(RECURRENCES["mlstm"], p)
    assert largest_error(o.detach().double(), expected) <= 1e-4


def test_a_rising_gate_in_bfloat16():
    """A logit near 300 is off by up to one in bfloat16, which moves the weights of all tokens."""
    torch.manual_seed(0)
    layer = MLSTM(32, num_heads=2)
    x = torch.randn(1, 256, 32)
    x[0, :, 0] = torch.linspace(0, 30, 256)
    with torch.no_grad():
        layer.b_proj.weight[:, 0] = 9.7
    layer, x = layer.bfloat16(), x.bfloat16()
    exact = deepcopy(layer).double()
    expected = exact(x.double())[0]
    assert relative_rms(layer(x)[0], expected) <= 1e-2


def test_gate_logits_have_the_gradients_of_a_product():
    layer = ExactLinear(3, 2).double()
    assert torch.autograd.gradcheck(layer, torch.randn(2, 4, 3).double().requires_grad_())
    low, x = layer.bfloat16(), torch.randn(2, 4, 3).bfloat16().requires_grad_()
    low(x).square().sum().backward()
    assert low(x).dtype == torch.float32
    assert x.grad.dtype == low.weight.grad.dtype == torch.bfloat16
    wide, y = deepcopy(low).double(), x.detach().double().requires_grad_()
    wide(y).square().sum().backward()
    assert relative_rms(x.grad, y.grad) <= 4e-3
    assert relative_rms(low.weight.grad, wide.weight.grad) <= 4e-3


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
