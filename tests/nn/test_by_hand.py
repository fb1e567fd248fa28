"""Every layer that is more than a rule on the frame beside its source, written out once more.

What each function takes is the layer and its input [T, hidden_size]; it returns what the layer puts
out, and the parts of its state that the source has too. The rules are in test_recurrences.py.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn.rotation import turned
from deltarule.ops.delta_rule import definition
from nn.layers import HIDDEN, inputs, make
from oracles import (
    decaying_fast_weights,
    hgrn,
    hyena,
    lru,
    mamba,
    mesa,
    mlstm,
    rg_lru,
    rotary,
    rwkv4,
    s4,
    slstm,
    titans,
    ttt,
)
from oracles.lifted import each_head, unit
from tolerance import relative_rms

DOUBLE = torch.float64
T = 21
gelu = partial(F.gelu, approximate="tanh")


def conv(layer, name, x, activation=F.silu):
    """The short convolution of [T, channels], if there is one."""
    if not hasattr(layer, f"{name}_conv"):
        return x
    weight = getattr(layer, f"{name}_conv").weight
    rows = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return activation(F.conv1d(rows, weight[:, None], groups=len(weight))).mT


def streams(layer, x, names="qkv", activation=F.silu):
    """Projections after their convolutions, [T, heads, channels]."""
    for name in names:
        y = conv(layer, name, getattr(layer, f"{name}_proj")(x), activation)
        heads = layer.num_v_heads if name == "v" else layer.num_heads
        yield y.unflatten(-1, (heads, -1))


def gated(layer, x, activation):
    return 1 if layer.g_proj is None else activation(layer.g_proj(x))


def rms(o, weight):
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def centred(layer, o, eps=1e-5):
    """Mean and variance of each head [.., heads, channels] out, then a weight and a bias."""
    normed = F.layer_norm(o, o.shape[-1:], eps=eps).flatten(-2)
    return normed * layer.o_norm.weight + layer.o_norm.bias


def per_head(recurrence, *streams):
    """o [T, heads, ..] and the last states of streams [T, heads, ..]."""
    o, states = each_head(recurrence, *(y[None] for y in streams))
    return o[0], states[0]


def by_its_definition(layer, x, activation, **arguments):
    """The operator, then norm and gate of each head."""
    given = {name: None if y is None else y[None] for name, y in arguments.items()}
    o, _ = definition.delta_rule(**given)
    return layer.o_proj(rms(o[0], layer.o_norm.weight).flatten(1) * gated(layer, x, activation)), {}


# ---- rules whose gates or norms are the layer's own ---------------------------------------------


def gated_deltanet2(layer, x):
    """Which projection feeds which gate: the erase the keys' channels, the write the values'."""
    q, k, v = streams(layer, x)
    q, k = unit(q), unit(k)
    dt = F.softplus(layer.a_proj(x).view(T, 2, 8) + layer.dt_bias)
    log_decay = -layer.A_log.exp()[:, None] * dt
    b, w = (torch.sigmoid(p(x)).view(T, 2, 8) for p in (layer.erase_proj, layer.write_proj))
    given = {"a": -log_decay.exp() * b * k, "b": k, "log_decay": log_decay}
    return by_its_definition(layer, x, torch.sigmoid, q=q, k=k, v=w * v, **given)


def mamba2(layer, x):
    """It gates before its norm."""
    C, B, X = streams(layer, x)
    dt = F.softplus(layer.a_proj(x) + layer.dt_bias)
    log_decay, beta = -layer.A_log.exp() * dt, None
    o, _ = definition.delta_rule(
        C[None], B[None], (X * dt[..., None])[None], beta=beta, log_decay=log_decay[None], scale=1.0
    )
    y = (o[0] + layer.D[:, None] * X).flatten(-2) * F.silu(layer.g_proj(x))
    return layer.o_proj(rms(y, layer.o_norm.weight)), {}


def mlstm_layer(layer, x):
    """arXiv 2405.04517, section 2.3: the cell, norm, output gate."""
    q, k, v = streams(layer, x)
    i, f = layer.b_proj(x) + layer.beta_bias, layer.a_proj(x) + layer.decay_bias

    def cell(*given):
        o, (C, _, _) = mlstm.recurrence(*given, eps=1e-6)
        return o, C

    read, C = per_head(cell, q, k, v, i, f)
    y = layer.o_proj(centred(layer, read) * torch.sigmoid(layer.g_proj(x)))
    # Both are e^-m times the paper's; the layer has one row more, for the normaliser.
    return y, {"recurrent": C * 8**0.5}


def shifts(x, mixes):
    """x mixed with the token before, [T, hidden_size] by each share."""
    before = F.pad(x, (0, 0, 1, 0))[:-1]
    return [x + share * (before - x) for share in mixes]


def rwkv6(layer, x):
    """One head at a time, in the letters of the authors' reference implementation."""
    last, states, rows = torch.zeros(HIDDEN, dtype=DOUBLE), torch.zeros(2, 8, 8).double(), []
    for token in x:
        sx, last = last - token, token
        xxx = torch.tanh(layer.mix_down(token + sx * layer.first_mix)).view(5, 32)
        mw, mk, mv, mr, mg = (xxx[i] @ layer.mix_up[i] + layer.shift_mix[i] for i in range(5))
        w = layer.a_proj[2](torch.tanh(layer.a_proj[0](token + sx * mw)))
        w = torch.exp(-torch.exp(layer.decay_bias.flatten() + w))
        k, v = layer.k_proj(token + sx * mk), layer.v_proj(token + sx * mv)
        r, g = layer.q_proj(token + sx * mr), F.silu(layer.g_proj(token + sx * mg))
        heads = []
        for h in range(2):
            rh, wh, kh, vh = (y.view(2, 8)[h] for y in (r, w, k, v))
            kv = torch.outer(kh, vh)
            heads.append(rh @ (layer.bonus[h][:, None] * kv + states[h]))
            states[h] = kv + wh[:, None] * states[h]
        rows.append(layer.o_proj(centred(layer, torch.stack(heads), 64e-5) * g))
    return torch.stack(rows), {"recurrent": states.mT}


# ---- layers over selective_scan -----------------------------------------------------------------


def values(layer, x):
    """The convolved values [T, inner] that Mamba's block scans."""
    return conv(layer, "v", layer.v_proj(x))


def end_of_block(layer, x, v, y):
    """Skip, gate and projection of Mamba's block for y [T, inner]."""
    return layer.o_proj((y + layer.D.flatten() * v) * F.silu(layer.g_proj(x)))


def mamba1(signed, layer, x):
    v = values(layer, x)
    dt = F.softplus(layer.a_proj(v) + layer.dt_bias.flatten())
    rates, D = layer.A_log.flatten(0, 1), torch.zeros(v.shape[1], dtype=DOUBLE)
    y, _ = mamba.recurrence(layer.q_proj(v), layer.k_proj(v), v, dt, rates, D, signed=signed)
    return end_of_block(layer, x, v, y), {}


def s4_real(layer, x):
    """S = S * exp(-(alpha 1^T) * exp(A)) + B * (v 1^T), o = (S * C) 1 + d * v.

    arXiv 2406.06484, table 4.
    """
    v = values(layer, x)
    A, B, C = (p.flatten(0, 1) for p in (layer.A_log, layer.B, layer.C))
    one, alpha = torch.ones(1, layer.head_k_dim, dtype=DOUBLE), layer.log_step.exp().flatten()
    S, y = torch.zeros_like(A), []
    for t in range(T):
        S = S * torch.exp(-(alpha[:, None] @ one) * A.exp()) + B * (v[t][:, None] @ one)
        y.append((S * C) @ one[0])
    state = S.unflatten(0, (layer.num_heads, -1))
    return end_of_block(layer, x, v, torch.stack(y)), {"recurrent": state}


def s4d(layer, x):
    v, rows, states = values(layer, x), [], []
    parts = [p.flatten(0, 1) for p in (layer.A_log, layer.frequency, layer.B, layer.C)]
    for channel, (rate, frequency, B, C) in enumerate(zip(*parts, strict=True)):
        A = torch.complex(-rate.exp(), frequency)
        B, C = (torch.complex(*p) for p in (B, C))
        dA, dB = s4.discretise(A, B, layer.log_step.flatten()[channel].exp())
        o, last = s4.recurrence(v[:, channel], dA, dB, C, 0.0)
        rows.append(o)
        states.append(torch.cat([last.real, last.imag]))
    state = torch.stack(states).unflatten(0, (layer.num_heads, -1))
    return end_of_block(layer, x, v, torch.stack(rows, 1)), {"recurrent": state}


def longhorn_released(layer, x):
    """dt = sigmoid / (1 + sigmoid |k|^2), S = (1 - dt k^2) S + dt x k, y = S q + D x."""
    v = values(layer, x)
    k, q = layer.k_proj(v), layer.q_proj(v)
    dt = torch.sigmoid(layer.b_proj(v) + layer.dt_bias.flatten())
    S, y = torch.zeros(v.shape[1], layer.head_k_dim, dtype=DOUBLE), []
    for t in range(T):
        step = dt[t] / (1 + dt[t] * (k[t] * k[t]).sum())
        S = S * (1 - torch.outer(step, k[t] ** 2)) + torch.outer(step * v[t], k[t])
        y.append(S @ q[t])
    state = S.unflatten(0, (layer.num_heads, -1))
    return end_of_block(layer, x, v, torch.stack(y)), {"recurrent": state}


def dfw(layer, x):
    """Scale and norm are the frame's."""
    q, k, v, a, b = streams(layer, x, "qkvab")
    given = q * layer.head_k_dim**-0.5, k, v, torch.sigmoid(a), torch.sigmoid(b)
    o, states = per_head(decaying_fast_weights.recurrence, *given)
    return layer.o_proj(rms(o, layer.o_norm.weight).flatten(1)), {"recurrent": states}


def in_its_frame(last, angle):
    """Complex [H, K] after T tokens, as the layer keeps it: turned back to its first token."""
    parts = torch.cat([last.real, last.imag], dim=-1)
    return turned(parts, -angle * (T - 1)).unsqueeze(-1)


def hgrn_layer(layer, x):
    bound = torch.rand(2, 4, dtype=DOUBLE)
    layer.lower_bound = lambda shared: bound
    c, f = F.silu(layer.v_proj(x)).view(T, 2, 2, 4), layer.a_proj(x).view(T, 2, 4)
    rows, states = [], []
    for head in range(2):
        given = torch.complex(c[:, head, 0], c[:, head, 1]), f[:, head], bound[head]
        h, last = hgrn.recurrence(*given, layer.frequency[head])
        rows.append(torch.cat([h.real, h.imag], dim=-1))
        states.append(last)
    o = rms(torch.cat(rows, dim=-1), layer.o_norm.weight) * gated(layer, x, F.silu)
    return layer.o_proj(o), {"recurrent": in_its_frame(torch.stack(states), layer.frequency)}


def rg_lru_layer(layer, x):
    u = conv(layer, "v", layer.v_proj(x), activation=lambda y: y)
    a, i = (
        rg_lru.block_diagonal(u, getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_bias"))
        for name in "ai"
    )
    h, last = rg_lru.recurrence(u, a, i, layer.rate.flatten(), torch.arange(T) == 0)
    return layer.o_proj(h * gated(layer, x, gelu)), {"recurrent": last.view(2, 8, 1)}


def lru_layer(layer, x):
    u, rows, states = layer.v_proj(x).view(T, 2, 6), [], []
    for head in range(2):
        B, C = (torch.complex(*p[head].unbind(0)) for p in (layer.B, layer.C))
        rates = layer.nu[head], layer.theta[head], layer.gamma_log[head].exp()
        o, last = lru.recurrence(u[:, head], *rates, B, C, layer.D[head])
        rows.append(F.gelu(o))
        states.append(last)
    y = layer.o_proj(torch.cat(rows, dim=-1) * gated(layer, x, torch.sigmoid))
    return y, {"recurrent": in_its_frame(torch.stack(states), layer.theta.exp())}


def rwkv4_layer(layer, x):
    """Weights up to e^300 neither overflow nor vanish: the maximum that is kept cancels."""
    for_k, for_v, for_g = shifts(x, layer.shift_mix)
    k, v = layer.k_proj(for_k), layer.v_proj(for_v)
    o, (a, b, m) = rwkv4.recurrence(k, v, layer.A_log.exp().flatten(), layer.bonus.flatten())
    state = torch.cat([a.view(2, 8), b.view(2, 8)], dim=1).unsqueeze(-1)
    y = layer.o_proj(o * gated(layer, for_g, torch.sigmoid))
    return y, {"recurrent": state, "stabilizer": m.view(2, 8)}


# ---- layers with an operator of their own -------------------------------------------------------


def slstm_layer(layer, x):
    convolved = conv(layer, "x", x)
    given = {"i": convolved, "f": convolved, "v": x, "r": x}
    gates = [
        getattr(layer, f"{name}_proj")(y).unflatten(1, (2, 8)) + layer.gate_bias[:, index]
        for index, (name, y) in enumerate(given.items())
    ]
    recurrent = dict(zip("ifzo", layer.recurrent.unbind(1), strict=True))
    h, last = slstm.recurrence(*gates, recurrent)
    return layer.o_proj(centred(layer, h)), {"recurrent": torch.stack(last, 1)}


def filters(layer):
    """h_j = W_4 sin(w W_3 sin(w W_2 sin(w W_1 e(j / L)))) exp(-j / L |rate|), one lag at a time."""
    rows = []
    for lag in range(T):
        t = lag / layer.filter_size
        turns = [2 * math.pi * t * k for k in range(16)]
        x = torch.tensor([t, *map(math.cos, turns), *map(math.sin, turns)], dtype=DOUBLE)
        for weight in (layer.filter_1, layer.filter_2, layer.filter_3):
            x = torch.sin(layer.frequency * (weight[:, :-1] @ x + weight[:, -1]))
        rows.append(layer.filter_4 @ x * torch.exp(-t * layer.rate.abs()))
    return torch.stack(rows)


def hyena_layer(layer, x):
    q, k, v = (y.flatten(1) for y in streams(layer, x, activation=lambda y: y))
    return layer.o_proj(hyena.hyena(q, k, v, filters(layer), layer.D)), {}


def multi_head_hyena(layer, x):
    q, k, v = streams(layer, x, activation=lambda y: y)
    taps = filters(layer)
    heads = [hyena.multi_head(q[:, h], k[:, h], v[:, h], taps[:, h], layer.D[h]) for h in range(2)]
    return layer.o_proj(torch.cat(heads, dim=1)), {}


def gsa(layer, x):
    """arXiv 2409.07146, eq. 8: K~ = Diag(a) K~ + (1 - a) k^T, V~ too, o = V~^T softmax(K~ q)."""
    q, k, v, logits = streams(layer, x, "qkvs")

    def recurrence(q, k, v, a):
        keys, values, o = torch.zeros(a.shape[1], 1), torch.zeros(a.shape[1], 1), []
        for t in range(T):
            gate = a[t][:, None]
            keys = gate * keys + (1 - gate) * k[t]
            values = gate * values + (1 - gate) * v[t]
            o.append(values.T @ torch.softmax(keys @ q[t], 0))
        return torch.stack(o), values.T

    given = F.silu(q), F.silu(k), F.silu(v), torch.sigmoid(logits) ** (1 / 8)
    o, values = per_head(recurrence, *given)
    y = layer.o_proj(rms(F.silu(o).flatten(1), layer.o_norm.weight))
    return y, {"recurrent": values}


def abc(layer, x):
    """arXiv 2110.02488: a slot holds sum exp(s) k / sum exp(s); attention is to the slots."""
    q, k, v, s = streams(layer, x, "qkvs")
    o = torch.zeros_like(v)
    for head in range(layer.num_heads):
        for t in range(T):
            phi = s[: t + 1, head].exp()
            keys = phi.T @ k[: t + 1, head] / phi.sum(0)[:, None]
            values = phi.T @ v[: t + 1, head] / phi.sum(0)[:, None]
            scores = keys @ q[t, head] * layer.head_k_dim**-0.5
            o[t, head] = torch.softmax(scores, 0) @ values
    o = rms(o, layer.o_norm.weight).flatten(1) * F.silu(layer.g_proj(x))
    return layer.o_proj(o), {}


def mesa_layer(layer, x):
    q, k, v = streams(layer, x)
    beta, decay = (torch.sigmoid(proj(x)) for proj in (layer.b_proj, layer.a_proj))
    ridge = 0.25 + F.softplus(layer.regularizer_logits)
    gates = (y.T for y in (decay, beta))
    given = (y.transpose(0, 1) for y in (unit(q) / math.sqrt(8), unit(k), v))
    o = [mesa.recurrence(*head)[0] for head in zip(*given, *gates, ridge, strict=True)]
    return layer.o_proj(rms(torch.stack(o, 1), layer.o_norm.weight).flatten(-2)), {}


def ttt_layer(network, base_rate, layer, x):
    q, k, v = streams(layer, x)
    rate, size = base_rate * torch.sigmoid(layer.b_proj(x)) / 8, layer.mini_batch
    # Angles begin again in every mini-batch.
    theta, places = rotary.frequencies(8), torch.arange(T) % size
    scale = (ttt.default_scale(size) + layer.step_offset).clamp(min=0)
    o = torch.zeros_like(v)
    for h in range(2):
        turned_q, turned_k = (rotary.rotate(y[:, h], places, theta) for y in (q, k))
        weights = {f"W{i + 1}": start[h, :, :-1].mT for i, start in enumerate(layer.starts)}
        weights |= {f"b{i + 1}": start[h, :, -1] for i, start in enumerate(layer.starts)}
        norm = layer.inner_norm_weight[h], layer.inner_norm_bias[h]
        given = turned_q, turned_k, v[:, h], rate[:, h], scale, *norm
        o[:, h] = ttt.recurrence(network, weights, *given)[0]
    o = F.layer_norm(o.flatten(1), (16,), layer.o_norm.weight, layer.o_norm.bias, 1e-5)
    return layer.o_proj(gelu(layer.g_proj(x)) * o), {}


def titans_layer(share, layer, x):
    largest = share / (2 * layer.mini_batch)
    q, k, v = streams(layer, x)
    q, k = unit(q), unit(k)
    if share < 1:
        assert (v.norm(dim=-1) > 4).any() == (x.abs().max() > 40)
        v = v * (4 / v.norm(dim=-1, keepdim=True)).clamp(max=1)
    a, b, m = (proj(x) for proj in (layer.a_proj, layer.b_proj, layer.m_proj))
    eta, keep = torch.sigmoid(m), torch.sigmoid(a + layer.decay_bias)
    theta = largest * (1 - eta) * torch.sigmoid(b)
    o, memory = torch.zeros_like(v), partial(titans.mlp, activation=gelu)
    for h in range(2):
        weights = {f"W{i}": start[h] for i, start in enumerate(layer.starts)}
        given = (y[:, h] for y in (q, k, v, theta, eta, 1 - keep))
        o[:, h] = titans.recurrence(memory, weights, *given, mini_batch=layer.mini_batch)[0]
    y = rms(o, layer.o_norm.weight).flatten(1) * F.silu(layer.g_proj(x))
    return layer.o_proj(y), {}


BY_HAND = {
    "gated_deltanet2": gated_deltanet2, "mamba2": mamba2,
    "mlstm": mlstm_layer, "rwkv6": rwkv6, "mamba1": partial(mamba1, False),
    "signed_mamba1": partial(mamba1, True), "s4": s4_real, "s4d": s4d, "dfw": dfw,
    "longhorn_released": longhorn_released, "hgrn": hgrn_layer, "rg_lru": rg_lru_layer,
    "lru": lru_layer, "rwkv4": rwkv4_layer, "slstm": slstm_layer, "hyena": hyena_layer,
    "multi_head_hyena": multi_head_hyena, "gsa": gsa, "abc": abc, "mesa": mesa_layer,
    "ttt_linear": partial(ttt_layer, ttt.linear, 1.0),
    "ttt_mlp": partial(ttt_layer, ttt.mlp, 0.1),
    "titans_linear": partial(titans_layer, 1.0), "titans_mlp": partial(titans_layer, 0.1),
}  # fmt: skip
# Options of a layer, and the size of its input.
OTHERS = {
    "dfw": [({"conv_size": 0}, 1)], "gsa": [({"conv_size": 0}, 1)],
    **{name: [({"output_gate": gate}, 1) for gate in (True, False)]
       for name in ("hgrn", "rg_lru", "lru")},
    "rwkv4": [({"output_gate": gate}, size) for gate in (True, False) for size in (1, 300)],
    **{name: [({"output_gate": True, "mini_batch": size}, 1) for size in (None, 1, 5)]
       for name in ("ttt_linear", "ttt_mlp")},
    **{name: [({"mini_batch": size}, large) for size in (None, 1, 5) for large in (1, 40)]
       for name in ("titans_linear", "titans_mlp")},
}  # fmt: skip
CASES = [(name, *case) for name in BY_HAND for case in OTHERS.get(name, [({}, 1)])]


@torch.no_grad()
@pytest.mark.parametrize(("name", "options", "size"), CASES)
def test_by_hand(name, options, size):
    layer, x = make(name, DOUBLE, **options), size * inputs(1, T, DOUBLE)
    expected, states = BY_HAND[name](layer, x[0])
    y, state = layer(x)
    assert relative_rms(y[0], expected) <= 1e-12
    for key, tensor in states.items():
        assert relative_rms(state[key][0][tuple(map(slice, tensor.shape))], tensor) <= 1e-12
