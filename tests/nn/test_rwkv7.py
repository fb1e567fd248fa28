"""RWKV-7's own parts: values of the first layer, bonus, norm, decays to start with."""

import math

import torch
import torch.nn.functional as F

from deltarule.nn import RWKV7
from nn.layers import HIDDEN, config, inputs, make
from tolerance import relative_rms


def test_equals_the_authors_block():
    """One head at a time, in the letters of the authors' reference implementation."""
    layer, x = make("rwkv7", torch.float64), inputs(1, 12, torch.float64)
    first = torch.randn(1, 12, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        y, _ = layer(x, shared={"rwkv7_first_values": first})
        expected = by_hand(layer, x[0], first[0].flatten(1))
    assert relative_rms(y[0], expected) <= 1e-12


def by_hand(layer, x, first_values):
    last_x, states, rows = torch.zeros(HIDDEN, dtype=x.dtype), torch.zeros(2, 8, 8).double(), []
    for token, v0 in zip(x, first_values, strict=True):
        mixed = (token + mix * (last_x - token) for mix in layer.shift_mix)
        xr, xw, xk, xv, xa, xg = mixed
        last_x = token
        r, k, v = layer.q_proj(xr), layer.k_proj(xk), layer.v_proj(xv)
        w = layer.decay_bias.flatten() + low_rank(layer.a_proj, xw, torch.tanh)
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(w))
        a = torch.sigmoid(layer.erase_bias.flatten() + low_rank(layer.erase_proj, xa))
        g = low_rank(layer.g_proj, xg, torch.sigmoid)
        v = v + (v0 - v) * torch.sigmoid(
            layer.value_bias.flatten() + low_rank(layer.value_proj, xv)
        )
        kk = k * layer.erase_scale.flatten()
        k = k * (1 + (a - 1) * layer.replace_scale.flatten())
        per_head = zip(*(t.view(2, 8) for t in (r, w, k, v, kk, a)), strict=True)
        heads = [one_head(layer, states, h, *vectors) for h, vectors in enumerate(per_head)]
        rows.append(layer.o_proj(torch.cat(heads) * g))
    return torch.stack(rows)


def one_head(layer, states, h, r, w, k, v, kk, a):
    kk = kk / kk.norm()
    states[h] = states[h] @ (w.diag() - torch.outer(kk, a * kk)) + torch.outer(v, k)
    o = states[h] @ r
    o = (o - o.mean()) / torch.sqrt(o.var(unbiased=False) + 64e-5)
    weight, bias = (p.view(2, 8)[h] for p in (layer.o_norm.weight, layer.o_norm.bias))
    return o * weight + bias + (r * k * layer.bonus[h]).sum() * v


def low_rank(small, x, activation=lambda y: y):
    return small[-1](activation(small[0](x)))


def test_the_first_layer_shares_its_values():
    first = RWKV7.from_config(config(), 0)
    second = RWKV7.from_config(config(), 1)
    x, shared = inputs(1, 5), {}
    first(x, shared=shared)
    values = shared["rwkv7_first_values"]
    assert torch.equal(values.flatten(-2), first.v_proj(shifted(first, x)))
    y, _ = second(x, shared=shared)
    assert torch.equal(shared["rwkv7_first_values"], values)
    assert not torch.equal(y, second(x)[0])


def shifted(layer, x):
    mix = layer.shift_mix[3]
    return torch.addcmul(x, F.pad(x, (0, 0, 1, -1)) - x, mix)


def test_the_first_of_its_kind_in_a_hybrid_needs_no_value_projection():
    layers = config(layer_types=("attention", "rwkv7", "rwkv7"))
    assert RWKV7.from_config(layers, 1).value_proj is None
    assert RWKV7.from_config(layers, 2).value_proj is not None


def test_starts_with_slow_and_fast_decays():
    bias = RWKV7(HIDDEN, num_heads=2).decay_bias.flatten()
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(bias))
    assert decay[0] > 0.999
    assert 0.85 < decay[-1] < 0.95
