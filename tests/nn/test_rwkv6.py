"""RWKV-6's own parts: the token shift with its low-rank shares, the gates, norm and start."""

import torch
import torch.nn.functional as F

import deltarule
from deltarule.nn import RWKV6
from nn.layers import HIDDEN, inputs, make
from tolerance import relative_rms


def test_equals_the_authors_block():
    """One head at a time, in the letters of the authors' reference implementation."""
    layer, x = make("rwkv6", torch.float64), inputs(1, 12, torch.float64)
    with torch.no_grad():
        assert relative_rms(layer(x)[0][0], by_hand(layer, x[0])) <= 1e-12


def by_hand(layer, x):
    last, states, rows = torch.zeros(HIDDEN, dtype=x.dtype), torch.zeros(2, 8, 8).double(), []
    for token in x:
        sx = last - token
        last = token
        xxx = token + sx * layer.first_mix
        xxx = torch.tanh(layer.mix_down(xxx)).view(5, 32)
        mw, mk, mv, mr, mg = (xxx[i] @ layer.mix_up[i] + layer.shift_mix[i] for i in range(5))
        w = layer.decay_bias.flatten() + layer.a_proj[2](
            torch.tanh(layer.a_proj[0](token + sx * mw))
        )
        w = torch.exp(-torch.exp(w))
        k, v = layer.k_proj(token + sx * mk), layer.v_proj(token + sx * mv)
        r, g = layer.q_proj(token + sx * mr), F.silu(layer.g_proj(token + sx * mg))
        heads = [
            one_head(layer, states, h, *(y.view(2, 8)[h] for y in (r, w, k, v))) for h in range(2)
        ]
        rows.append(layer.o_proj(torch.cat(heads) * g))
    return torch.stack(rows)


def one_head(layer, states, h, r, w, k, v):
    kv = torch.outer(k, v)
    o = r @ (layer.bonus[h][:, None] * kv + states[h])
    states[h] = kv + w[:, None] * states[h]
    o = (o - o.mean()) / torch.sqrt(o.var(unbiased=False) + 64e-5)
    weight, bias = (p.view(2, 8)[h] for p in (layer.o_norm.weight, layer.o_norm.bias))
    return o * weight + bias


def test_the_state_is_the_matrix_after_the_last_token():
    layer, x = make("rwkv6", torch.float64), inputs(1, 7, torch.float64)
    _, state = layer(x)
    _, longer = layer(torch.cat([x, x[:, :1]], dim=1))
    _, continued = layer(x[:, :1], state)
    assert relative_rms(continued["recurrent"], longer["recurrent"]) <= 1e-12
    assert relative_rms(state["recurrent"], longer["recurrent"]) > 0.01


def test_nothing_crosses_from_one_document_to_the_next():
    layer, x = make("rwkv6"), inputs(1, 9)
    changed = x.clone()
    changed[:, :4] += 1
    y, other = (layer(z, cu_seqlens=deltarule.pack([4, 0, 5]))[0] for z in (x, changed))
    assert torch.equal(y[:, 4:], other[:, 4:])
    assert not torch.equal(y[:, :4], other[:, :4])


def test_starts_with_slow_and_fast_decays():
    layer = RWKV6(HIDDEN, num_heads=2)
    decay = torch.exp(-torch.exp(layer.decay_bias.flatten()))
    assert decay[0] > 0.997
    assert 0.6 < decay[-1] < 0.7
