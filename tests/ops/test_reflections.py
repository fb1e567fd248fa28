"""Beyond beta = 1 less is forgotten, roundings included: how far they may grow in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from deltarule import delta_rule
from oracles import kda
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
    given = (x.double() for x in (q, k, v, torch.zeros_like(k), beta))
    expected, state = each_head(kda.recurrence, *given)
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


def commonest(k: Tensor) -> float:
    """What unit keys [T, K] have of their squared length in one direction."""
    k = k.double()
    return torch.linalg.eigvalsh(k.mT @ k)[-1].item() / len(k)


@pytest.mark.parametrize("aligned", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 1.9, 1.99, 2.0])
@pytest.mark.parametrize("size", [16, 128])
def test_what_is_not_forgotten_and_what_keys_have_in_common(size, beta, aligned):
    """Of keys that spread evenly, and of keys that lean one way by so much."""
    q, k, v, strength = drawn(1024, size)
    k = normalize(torch.randn_like(k) + aligned * torch.randn(2, size), dim=-1)
    strength = strength * beta / 2
    expected = delta_rule(q.double(), k.double(), v.double(), beta=strength.double())
    share = max(commonest(head) for head in k[0].unbind(1))
    bar = growth(1024, size, beta, share)
    for found, truth in zip(delta_rule(q, k, v, beta=strength), expected, strict=True):
        assert_close(found, truth, growth=bar)
        # Without the one or the other it would be too little, and it is not ten times too much.
        if beta >= 1.9 and aligned == 0:
            assert relative_rms(found, truth) > bar * 1e-6 / 10
        if beta == 2.0 and aligned == 3.0 and size == 128:
            assert relative_rms(found, truth) > growth(1024, size) * 1e-6


def test_evenly_spread_keys_below_one_are_within_the_plain_bar():
    assert growth(10**6, 64, 1.0) == growth(10**6, 64, 0.1) == growth(64, 64) == 1
    assert growth(4096, 64) == 8
    assert growth(4096, 64, 1.9) == pytest.approx((1 / 0.19) ** 0.5)
    assert growth(4096, 64, 1.0, share=0.25) == 4
