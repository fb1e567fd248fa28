"""beta = 2 without decay forgets nothing, roundings included: how far they may grow in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from deltarule import delta_rule
from oracles import delta_scan
from oracles.lifted import each_head
from tolerance import assert_close, growth, relative_rms


def drawn(tokens: int, size: int) -> tuple[Tensor, ...]:
    """q, k, v and beta of two heads."""
    q, k, v = torch.randn(3, 1, tokens, 2, size)
    return normalize(q, dim=-1), normalize(k, dim=-1), v, torch.full((1, tokens, 2), 2.0)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(("tokens", "size"), [(64, 16), (1024, 16), (1024, 64)])
def test_outputs_and_states(tokens, size, impl):
    q, k, v, beta = drawn(tokens, size)
    expected, state = each_head(delta_scan.recurrence, *(x.double() for x in (q, k, v, beta)))
    out = delta_rule(q, k, v, beta=beta, scale=1.0, impl=impl)
    factor = growth(tokens, size)
    assert_close(out.o, expected, growth=factor)
    assert_close(out.final_state, state, growth=factor)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64, 128])
def test_outputs_of_long_sequences(size):
    """The chunks in float64 are within 1e-12 of the definition, and stand for it here."""
    q, k, v, beta = drawn(8192, size)
    expected = delta_rule(q.double(), k.double(), v.double(), beta=beta.double())
    out = delta_rule(q, k, v, beta=beta)
    for found, truth in zip(out, expected, strict=True):
        assert_close(found, truth, growth=growth(8192, size))


@pytest.mark.parametrize(("tokens", "size"), [(64, 16), (1024, 16), (1024, 64)])
def test_gradients(tokens, size):
    given = drawn(tokens, size)
    d_o = torch.randn_like(given[2])

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = delta_rule(*leaves[:3], beta=leaves[3])
        return torch.autograd.grad(out.o, leaves, d_o.to(dtype))

    for found, truth in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert_close(found, truth, gradient=True, growth=growth(tokens, size))


def test_a_reflection_less_and_roundings_do_not_grow():
    q, k, v, beta = drawn(2048, 16)
    expected = delta_rule(q.double(), k.double(), v.double(), beta=0.75 * beta.double())
    assert relative_rms(delta_rule(q, k, v, beta=0.75 * beta).o, expected.o) <= 1e-6
