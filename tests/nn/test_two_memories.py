"""ABC and gated slot attention against their sources, written out once more as loops."""

import pytest
import torch
import torch.nn.functional as F

from deltarule import nn, pack
from deltarule.nn.layout import make_layout
from deltarule.nn.two_memories import LOG_ZERO, running_log_sum
from nn.layers import inputs, make
from tolerance import relative_rms

DOUBLE = torch.float64
T = 10


def projected(layer, x):
    """q, k, v and the slots' logits as [T, heads, channels]."""
    names = ("q_proj", "k_proj", "v_proj", "s_proj")
    return [getattr(layer, name)(x)[0].view(T, layer.num_heads, -1) for name in names]


@torch.no_grad()
def test_gsa_by_hand():
    """arXiv 2409.07146, eq. 8: K~ = Diag(a) K~ + (1 - a) k^T, V~ too, o = V~^T softmax(K~ q)."""
    layer, x = make("gsa", DOUBLE, conv_size=0), inputs(1, T, DOUBLE)
    q, k, v, logits = projected(layer, x)
    q, k, v, a = F.silu(q), F.silu(k), F.silu(v), torch.sigmoid(logits) ** (1 / 8)
    o = torch.zeros_like(v)
    for head in range(layer.num_heads):
        keys = torch.zeros(layer.num_slots, layer.head_k_dim, dtype=DOUBLE)
        values = torch.zeros(layer.num_slots, layer.head_v_dim, dtype=DOUBLE)
        for t in range(T):
            gate = a[t, head][:, None]
            keys = gate * keys + (1 - gate) * k[t, head]
            values = gate * values + (1 - gate) * v[t, head]
            o[t, head] = values.T @ torch.softmax(keys @ q[t, head], 0)
    o = F.silu(o).flatten(1)
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    assert relative_rms(layer(x)[0][0], layer.o_proj(o)) <= 1e-12


@torch.no_grad()
def test_abc_by_hand():
    """arXiv 2110.02488: a slot holds sum exp(s) k / sum exp(s); attention is to the slots."""
    layer, x = make("abc", DOUBLE), inputs(1, T, DOUBLE)
    q, k, v, s = projected(layer, x)
    o = torch.zeros_like(v)
    for head in range(layer.num_heads):
        for t in range(T):
            phi = s[: t + 1, head].exp()
            keys = phi.T @ k[: t + 1, head] / phi.sum(0)[:, None]
            values = phi.T @ v[: t + 1, head] / phi.sum(0)[:, None]
            scores = keys @ q[t, head] * layer.head_k_dim**-0.5
            o[t, head] = torch.softmax(scores, 0) @ values
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    o = o.flatten(1) * F.silu(layer.g_proj(x[0]))
    assert relative_rms(layer(x)[0][0], layer.o_proj(o)) <= 1e-12


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


@pytest.mark.parametrize(("name", "key"), [("abc", "log_sum"), ("abc", "keys"), ("gsa", "keys")])
def test_memories_in_16_bits_are_refused(name, key):
    layer = make(name)
    _, state = layer(inputs(1, 3))
    state[key] = state[key].bfloat16()
    with pytest.raises(ValueError, match=rf"state\['{key}'\] must be torch.float32"):
        layer(inputs(1, 3), state)


def test_widths():
    layer = nn.ABC(64, num_heads=2)
    assert (layer.head_k_dim, layer.head_v_dim, layer.num_slots) == (16, 32, 16)
    layer = nn.GatedSlotAttention(64, num_heads=2, num_slots=7)
    assert (layer.head_k_dim, layer.head_v_dim, layer.num_slots) == (32, 32, 7)
