"""Mesa, TTT and Titans by hand: every step of the layer once more, one head and token at a time."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import MIXERS, Mesa, TitansLinear, TTTLinear
from nn.layers import HIDDEN, config, inputs, make
from oracles import titans
from tolerance import relative_rms

DOUBLE = torch.float64
NETWORKS = ["ttt_linear", "ttt_mlp", "titans_linear", "titans_mlp"]
TOKENS, HEADS, SIZE = 21, 2, 8


def stream(layer, name, x):
    """Project, convolve where the layer does, and split: [T, HEADS, SIZE]."""
    y = getattr(layer, f"{name}_proj")(x)
    if hasattr(layer, f"{name}_conv"):
        weight = getattr(layer, f"{name}_conv").weight
        y = F.silu(F.conv1d(F.pad(y.mT, (3, 0)), weight[:, None], groups=len(weight)).mT)
    return y[0].view(-1, HEADS, SIZE)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(o, weight):
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_mesa():
    layer, x = make("mesa", DOUBLE), inputs(1, TOKENS, DOUBLE)
    with torch.no_grad():
        q, k, v = (stream(layer, name, x) for name in "qkv")
        q, k = unit(q), unit(k)
        beta, decay = (torch.sigmoid(proj(x))[0] for proj in (layer.b_proj, layer.a_proj))
        ridge = 0.25 + F.softplus(layer.regularizer_logits)
        o = torch.zeros_like(v)
        for h in range(HEADS):
            covariance, values = torch.zeros(2, SIZE, SIZE, dtype=DOUBLE)
            for t in range(TOKENS):
                g, b = decay[t, h], beta[t, h]
                covariance = g * covariance + b * torch.outer(k[t, h], k[t, h])
                values = g * values + b * torch.outer(v[t, h], k[t, h])
                solution = torch.linalg.solve(covariance + torch.diag(ridge[h]), q[t, h])
                o[t, h] = values @ solution / math.sqrt(SIZE)
        expected = layer.o_proj(rms(o, layer.o_norm.weight).flatten(-2))
        assert relative_rms(layer(x)[0][0], expected) <= 1e-12


def test_mesa_starts_with_a_regularizer_of_one():
    logits = Mesa(HIDDEN, num_heads=2).regularizer_logits
    assert (0.25 + F.softplus(logits) - 1).abs().max() <= 1e-6


def test_mesa_solves_exactly_on_request():
    layer, x = make("mesa", DOUBLE), inputs(1, TOKENS, DOUBLE)
    y, _ = layer(x)
    layer.iterations = None
    assert relative_rms(layer(x)[0], y) <= 1e-12
    layer.iterations = 1
    assert relative_rms(layer(x)[0], y) > 1e-3


def rotated(x, place):
    """Each pair (i, i + SIZE / 2) turned by place * 10000^(-2 i / SIZE)."""
    half = SIZE // 2
    angle = place * 10000.0 ** -(torch.arange(half, dtype=DOUBLE) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def network(maps, x):
    for index, weights in enumerate(maps):
        x = F.gelu(x, approximate="tanh") if index else x
        x = weights[:, : len(x)] @ x + weights[:, len(x) :].sum(-1)
    return x


def norm(x, weight, bias, eps):
    return (x - x.mean()) / (x.var(unbiased=False) + eps).sqrt() * weight + bias


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize(("name", "base_rate"), [("ttt_linear", 1.0), ("ttt_mlp", 0.1)])
def test_ttt(name, base_rate, size):
    layer = make(name, DOUBLE, output_gate=True, mini_batch=size)
    x, size = inputs(1, TOKENS, DOUBLE), size or 16
    q, k, v = (stream(layer, part, x).detach() for part in "qkv")
    rate = base_rate * torch.sigmoid(layer.b_proj(x))[0].detach() / SIZE
    o = torch.zeros_like(v)
    for h in range(HEADS):
        inner = layer.inner_norm_weight[h].detach(), layer.inner_norm_bias[h].detach(), 1e-6
        W = [start[h].detach() for start in layer.starts]
        for t in range(TOKENS):
            place = t % size
            if place == 0:
                summed = [torch.zeros_like(w) for w in W]
            leaves = [w.clone().requires_grad_() for w in W]
            key = rotated(k[t, h], place)
            fitted = key + norm(network(leaves, key), *inner)
            loss = 0.5 * (fitted - v[t, h]).square().sum()
            summed = [s + rate[t, h] * g for s, g in
                      zip(summed, torch.autograd.grad(loss, leaves), strict=True)]  # fmt: skip
            scale = max(0.0, 1 / (place + 1) + layer.step_offset[place].item())
            now = [w - scale * s for w, s in zip(W, summed, strict=True)]
            query = rotated(q[t, h], place)
            o[t, h] = query + norm(network(now, query), *inner)
            W = now if place == size - 1 else W
    with torch.no_grad():
        o = F.layer_norm(
            o.flatten(-2), (HEADS * SIZE,), layer.o_norm.weight, layer.o_norm.bias, 1e-5
        )
        gate = F.gelu(layer.g_proj(x)[0], approximate="tanh")
        assert relative_rms(layer(x)[0][0], layer.o_proj(gate * o)) <= 1e-12


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("mini_batch", [None, 1, 5])
@pytest.mark.parametrize(("name", "share"), [("titans_linear", 1), ("titans_mlp", 0.1)])
def test_titans(name, share, mini_batch, size):
    layer, x = make(name, DOUBLE, mini_batch=mini_batch), size * inputs(1, TOKENS, DOUBLE)
    mini_batch = mini_batch or 16
    largest = share / (2 * mini_batch)
    q, k, v = (stream(layer, part, x).detach() for part in "qkv")
    q, k = unit(q), unit(k)
    if name == "titans_mlp":
        assert (v.norm(dim=-1) > 4).any() == (size > 1)
        v = v * (4 / v.norm(dim=-1, keepdim=True)).clamp(max=1)
    projections = layer.a_proj, layer.b_proj, layer.m_proj
    a, b, m = (proj(x)[0].detach() for proj in projections)
    eta, keep = torch.sigmoid(m), torch.sigmoid(a + layer.decay_bias.detach())
    theta = largest * (1 - eta) * torch.sigmoid(b)
    o = torch.zeros_like(v)
    network = partial(titans.mlp, activation=partial(F.gelu, approximate="tanh"))
    for h in range(HEADS):
        weights = {f"W{i}": start[h].detach() for i, start in enumerate(layer.starts)}
        gates = theta[:, h], eta[:, h], 1 - keep[:, h]
        o[:, h], _, _ = titans.recurrence(
            network, weights, q[:, h], k[:, h], v[:, h], *gates, mini_batch=mini_batch
        )
    with torch.no_grad():
        gate = F.silu(layer.g_proj(x)[0])
        expected = layer.o_proj(rms(o, layer.o_norm.weight).flatten(-2) * gate)
        assert relative_rms(layer(x)[0][0], expected) <= 1e-12


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
