"""Layers whose state is a network, a regression or slots: bounded, alive, finite, and learned."""

import pytest
import torch

from deltarule import pack
from deltarule.nn import MIXERS, TitansLinear, TTTLinear
from deltarule.nn.layout import make_layout
from deltarule.nn.two_memories import LOG_ZERO, running_log_sum
from nn.layers import HIDDEN, config, inputs, make
from tolerance import relative_rms

DOUBLE = torch.float64
NETWORKS = ["ttt_linear", "ttt_mlp", "titans_linear", "titans_mlp"]


def test_mesa_solves_exactly_on_request():
    layer, x = make("mesa", DOUBLE), inputs(1, 21, DOUBLE)
    y, _ = layer(x)
    layer.iterations = None
    assert relative_rms(layer(x)[0], y) <= 1e-12
    layer.iterations = 1
    assert relative_rms(layer(x)[0], y) > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("momentum_logit", [-4.0, 4.0])
def test_equal_tokens_do_not_make_the_memory_grow_without_bound(name, momentum_logit):
    torch.manual_seed(0)
    layer = MIXERS[name](HIDDEN, num_heads=2)
    x = torch.ones(1, 1, HIDDEN)
    if hasattr(layer, "m_proj"):
        # The same momentum for every token: x is constant.
        layer.m_proj.weight.data.fill_(momentum_logit / HIDDEN)
    with torch.no_grad():
        _, early = layer(2 * x.expand(1, 1024, HIDDEN))
        y, late = layer(2 * x.expand(1, 4096, HIDDEN), early)
    assert y.isfinite().all()
    assert late["recurrent"].norm() < 10 * early["recurrent"].norm()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_memory_of_a_long_random_sequence_stays_alive(name):
    torch.manual_seed(0)
    layer = MIXERS[name](HIDDEN, num_heads=2)
    with torch.no_grad():
        _, state = layer(torch.randn(1, 4096, HIDDEN))
    assert 1e-2 < state["recurrent"].norm() / layer.starts[0].norm() < 1e2


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [300, 1e6])
def test_large_inputs_do_not_make_the_memory_infinite(name, size):
    torch.manual_seed(0)
    layer, x = MIXERS[name](HIDDEN, num_heads=2), size * torch.randn(2, 512, HIDDEN)
    x[1] = x[1, :1] + 0.1 * x[1]
    y, state = layer(x)
    assert y.isfinite().all()
    assert all(maps.isfinite().all() for maps in state.values())
    y.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_network_is_learned(name):
    layer = make(name)
    layer(inputs(1, 40))[0].square().sum().backward()
    assert all((start.grad != 0).any() for start in layer.starts)
    _, state = layer(inputs(2, 0))
    for key, start in zip(layer.names("recurrent"), layer.starts, strict=True):
        assert torch.equal(state[key], start.expand(2, *start.shape))


def test_values_of_ttt_are_of_the_size_of_its_keys():
    layer = TTTLinear.from_config(config(head_k_dim=6, head_v_dim=4), 0)
    assert layer.head_v_dim == layer.head_k_dim == 6


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_says_how_long_mini_batches_are(name):
    layer = MIXERS[name].from_config(config(mini_batch=4), 0)
    assert layer(inputs(1, 7))[1]["position"].tolist() == [3]
    assert MIXERS[name].from_config(config(mini_batch=None), 0).mini_batch == 16


def test_titans_may_have_values_of_another_size():
    layer = TitansLinear(HIDDEN, num_heads=2, head_k_dim=8, head_v_dim=4, output_gate=False)
    assert layer(inputs(1, 5))[1]["recurrent"].shape == (1, 2, 4, 8)


def test_abc_holds_logits_that_have_no_exponential():
    layer, x = make("abc"), inputs(2, 50)
    with torch.no_grad():
        layer.s_proj.weight *= 1e3
    x.requires_grad_()
    y, state = layer(x)
    assert state["log_sum"].max() > 1e3
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("lengths", [None, (5, 0, 1, 14), (0,), (20,)])
def test_running_log_sum(lengths):
    torch.manual_seed(0)
    tokens = 20 if lengths is None else sum(lengths)
    cu_seqlens = None if lengths is None else pack(lengths)
    layout = make_layout(torch.zeros(1, tokens, 1), cu_seqlens, None)
    x, before = (
        torch.randn(1, tokens, 3, dtype=DOUBLE),
        torch.randn(layout.sequences, 1, 3).double(),
    )
    before[0] = LOG_ZERO
    found = running_log_sum(layout.with_history(x, before), layout)
    parts = x[0].split(list(lengths or (tokens,)))
    expected = [torch.cat([b, part]).logcumsumexp(0) for b, part in zip(before, parts, strict=True)]
    exact = torch.cat(expected)
    # A history of log 0 would make every other number look exact beside it.
    some = exact > LOG_ZERO / 2
    assert (found[0][~some] <= LOG_ZERO / 2).all()
    assert relative_rms(found[0][some], exact[some]) <= 1e-12
