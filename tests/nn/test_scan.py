"""The layers over `selective_scan` against their sources, each written out once more as a loop."""

import pytest
import torch
import torch.nn.functional as F

from deltarule import nn, selective_scan
from deltarule.nn import longhorn
from nn.layers import HIDDEN, inputs, make
from nn.test_layers import conv
from oracles import mamba
from tolerance import relative_rms

DOUBLE = torch.float64
T = 10


def block(name):
    """The layer, its input, and the convolved values [T, inner] that its scan starts from."""
    layer, x = make(name, DOUBLE), inputs(1, T, DOUBLE)
    return layer, x, conv(layer, "v", layer.v_proj(x))[0]


def end_of_block(layer, x, v, y):
    """Skip, gate and projection of Mamba's block for y [T, inner]."""
    y = y + layer.D.flatten() * v
    return layer.o_proj(y * F.silu(layer.g_proj(x[0])))


@torch.no_grad()
def test_mamba1_by_hand():
    """arXiv 2312.00752, algorithm 2: h_t = exp(Delta A) * h_{t-1} + Delta B x, y = C h + D x."""
    layer, x, v = block("mamba1")
    B, C = layer.k_proj(v), layer.q_proj(v)
    dt = F.softplus(layer.a_proj(v) + layer.dt_bias.flatten())
    A = -layer.A_log.exp().flatten(0, 1)
    y = torch.zeros_like(v)
    for channel in range(v.shape[1]):
        h = torch.zeros(layer.head_k_dim, dtype=DOUBLE)
        for t in range(T):
            h = torch.exp(dt[t, channel] * A[channel]) * h + dt[t, channel] * B[t] * v[t, channel]
            y[t, channel] = C[t] @ h
    assert relative_rms(layer(x)[0][0], end_of_block(layer, x, v, y)) <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_the_bias_of_the_convolution_comes_before_its_activation(name):
    layer, x = make(name, DOUBLE, conv_bias=True), inputs(1, T, DOUBLE)
    rows = F.pad(layer.v_proj(x).mT, (3, 0))
    expected = F.conv1d(rows, layer.v_conv.weight[:, None], layer.v_conv.bias, groups=rows.shape[1])
    seen = []
    layer.v_conv.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    layer(x)
    assert layer.v_conv.bias.abs().max() > 0
    assert relative_rms(seen[0], F.silu(expected).mT) <= 1e-12
    assert make(name).v_conv.bias is None


@torch.no_grad()
def test_signed_mamba1_by_its_oracle():
    layer, x, v = block("signed_mamba1")
    dt = F.softplus(layer.a_proj(v) + layer.dt_bias.flatten())
    rates, D = layer.A_log.flatten(0, 1), torch.zeros(v.shape[1], dtype=DOUBLE)
    y, _ = mamba.recurrence(layer.q_proj(v), layer.k_proj(v), v, dt, rates, D)
    assert relative_rms(layer(x)[0][0], end_of_block(layer, x, v, y)) <= 1e-12


@torch.no_grad()
def test_s4_by_hand():
    """Table 4 of 001: S = S * exp(-(alpha 1^T) * exp(A)) + B * (v 1^T), o = (S * C) 1 + d * v."""
    layer, x, v = block("s4")
    A, B, C = (p.flatten(0, 1) for p in (layer.A_log, layer.B, layer.C))
    one = torch.ones(1, layer.head_k_dim, dtype=DOUBLE)
    alpha = layer.log_step.exp().flatten()
    S, y = torch.zeros_like(A), []
    for t in range(T):
        S = S * torch.exp(-(alpha[:, None] @ one) * A.exp()) + B * (v[t][:, None] @ one)
        y.append((S * C) @ one[0])
    assert relative_rms(layer(x)[0][0], end_of_block(layer, x, v, torch.stack(y))) <= 1e-12


@torch.no_grad()
def test_s4_is_a_convolution():
    """Nothing in it depends on the input: one filter for each channel gives the same."""
    layer, x, v = block("s4")
    A, B, C = (p.flatten(0, 1) for p in (layer.A_log, layer.B, layer.C))
    lag = torch.arange(T, dtype=DOUBLE)
    decay = -(layer.log_step.exp().flatten()[:, None] * A.exp())
    filters = torch.einsum("vk, vks -> vs", B * C, torch.exp(decay[..., None] * lag))
    y = [sum(filters[:, t - s] * v[s] for s in range(t + 1)) for t in range(T)]
    assert relative_rms(layer(x)[0][0], end_of_block(layer, x, v, torch.stack(y))) <= 1e-12


@torch.no_grad()
def test_longhorn_released_by_hand():
    """dt = sigmoid / (1 + sigmoid |k|^2), S = (1 - dt k^2) S + dt x k, y = S q + D x."""
    layer, x, v = block("longhorn_released")
    k, q = layer.k_proj(v), layer.q_proj(v)
    dt = torch.sigmoid(layer.b_proj(v) + layer.dt_bias.flatten())
    S, y = torch.zeros(v.shape[1], layer.head_k_dim, dtype=DOUBLE), []
    for t in range(T):
        step = dt[t] / (1 + dt[t] * (k[t] * k[t]).sum())
        S = S * (1 - torch.outer(step, k[t] ** 2)) + torch.outer(step * v[t], k[t])
        y.append(S @ q[t])
    assert relative_rms(layer(x)[0][0], end_of_block(layer, x, v, torch.stack(y))) <= 1e-12


def test_longhorn_released_keeps_the_diagonal_of_the_closed_form_minimiser():
    """argmin |S - S'|^2 + sum_v b_v (S_v k - v_v)^2 = S' - e (S' k - v) k^T, with all of k k^T."""
    torch.manual_seed(0)
    k, q = torch.randn(2, 1, 1, 1, 4, dtype=DOUBLE).unbind()
    v, logits = torch.randn(2, 1, 1, 1, 3, dtype=DOUBLE).unbind()
    given = longhorn.released_arguments(
        q, k, v, beta_logits=logits, dt_bias=torch.zeros(1, 3, dtype=DOUBLE)
    )
    before, e, key = torch.randn(3, 4, dtype=DOUBLE), given["beta"][0, 0, 0], k[0, 0, 0]
    S = before - torch.outer(e * (before @ key - v[0, 0, 0]), key)
    S.requires_grad_()
    loss = (S - before).square().sum()
    loss = loss + (torch.sigmoid(logits[0, 0, 0]) * (S @ key - v[0, 0, 0]).square()).sum()
    (gradient,) = torch.autograd.grad(loss, S)
    assert gradient.abs().max() <= 1e-10 * before.abs().max()
    # The release drops what one key channel erases of another.
    transition = torch.eye(4, dtype=DOUBLE) - e[:, None, None] * torch.outer(key, key)
    diagonal = transition.diagonal(dim1=1, dim2=2)
    found = selective_scan(**given, initial_state=before[None, None]).final_state[0, 0]
    expected = before * diagonal + torch.outer(e * v[0, 0, 0], key)
    assert relative_rms(found, expected) <= 1e-12


@torch.no_grad()
def test_dfw_by_hand():
    """Table 4 of 001: S = S * (beta alpha^T) + v k^T, o = S q; scale and norm are the frame's."""
    layer, x = make("dfw", DOUBLE, conv_size=0), inputs(1, T, DOUBLE)
    heads, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    q, k, a = (p(x)[0].view(T, heads, K) for p in (layer.q_proj, layer.k_proj, layer.a_proj))
    v, b = (p(x)[0].view(T, heads, V) for p in (layer.v_proj, layer.b_proj))
    o = torch.zeros(T, heads, V, dtype=DOUBLE)
    for head in range(heads):
        S = torch.zeros(V, K, dtype=DOUBLE)
        for t in range(T):
            gate = torch.outer(torch.sigmoid(b[t, head]), torch.sigmoid(a[t, head]))
            S = S * gate + torch.outer(v[t, head], k[t, head])
            o[t, head] = S @ q[t, head] * K**-0.5
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    assert relative_rms(layer(x)[0][0], layer.o_proj(o.flatten(1))) <= 1e-12


def test_dfw_update_minimises_its_objective():
    """|S - Diag(b) S' Diag(a)|^2 - 2 <S k, v> has no gradient at the new state."""
    torch.manual_seed(0)
    before, gates = torch.randn(3, 4, dtype=DOUBLE), torch.rand(3, 4, dtype=DOUBLE)
    a, b, k, v = gates[0], gates[1, :3], torch.randn(4, dtype=DOUBLE), torch.randn(3, dtype=DOUBLE)
    after = selective_scan(
        k.view(1, 1, 1, 4), k.view(1, 1, 1, 4), v.view(1, 1, 1, 3),
        log_decay=a.log().view(1, 1, 1, 4), value_log_decay=b.log().view(1, 1, 1, 3),
        initial_state=before[None, None],
    ).final_state[0, 0].requires_grad_()  # fmt: skip
    loss = (after - b[:, None] * before * a).square().sum() - 2 * (after @ k) @ v
    (gradient,) = torch.autograd.grad(loss, after)
    assert gradient.abs().max() <= 1e-10


@pytest.mark.parametrize("name", ["mamba1", "signed_mamba1", "s4", "longhorn_released"])
def test_grouping_of_the_channels_changes_nothing(name):
    x = inputs(2, 7, DOUBLE)
    layer, grouped = make(name, DOUBLE, num_heads=1), make(name, DOUBLE, num_heads=4)
    given = {key: p.view_as(grouped.state_dict()[key]) for key, p in layer.state_dict().items()}
    grouped.load_state_dict(given)
    assert relative_rms(grouped(x)[0], layer(x)[0]) <= 1e-12


def test_starting_values():
    layer = nn.Mamba1(HIDDEN, num_heads=2)
    rate = torch.arange(1.0, 17).expand(2, HIDDEN, 16)
    assert torch.allclose(layer.A_log.exp(), rate, rtol=1e-6)
    dt = F.softplus(layer.dt_bias)
    assert dt.min() > 0.99e-3
    assert dt.max() < 0.101
    s4 = nn.S4(HIDDEN, num_heads=2)
    assert torch.allclose(s4.A_log.exp(), rate, rtol=1e-6)
    assert torch.allclose(s4.B, s4.log_step.exp().unsqueeze(-1).expand(2, HIDDEN, 16))
    assert (nn.LonghornReleased(HIDDEN, num_heads=2).dt_bias == 0).all()
    dfw = nn.DecayingFastWeights(HIDDEN, num_heads=2)
    assert (dfw.a_proj.bias == 4).all()
    assert (dfw.b_proj.bias == 4).all()


@pytest.mark.parametrize("name", ["mamba1", "s4", "longhorn_released", "dfw", "abc", "gsa"])
def test_options_of_the_frame(name):
    x = inputs(1, 5)
    with_filter, without = make(name, conv_size=3), make(name, conv_size=0)
    assert "v_conv" in with_filter.init_state(1)
    assert "v_conv" not in without.init_state(1)
    assert without(x)[0].shape == x.shape
    gated, plain = make(name, output_gate=True), make(name, output_gate=False)
    kept = {key: p for key, p in gated.state_dict().items() if "g_proj" not in key}
    plain.load_state_dict(kept)
    assert not torch.equal(gated(x)[0], plain(x)[0])


@pytest.mark.parametrize("tokens", [17, 300, 600])
def test_s4_by_convolution(tokens):
    """Outputs, the state and all gradients of the scan, from a state that is not zero."""
    layer, x = make("s4", DOUBLE), inputs(2, tokens, DOUBLE)
    before = layer(inputs(2, 9, DOUBLE) + 1)[1].detach()
    found = []
    for layer.convolves in (False, True):
        y, state = layer(x, before)
        loss = y.sin().sum() + state["recurrent"].cos().sum()
        found.append([y, state["recurrent"], *torch.autograd.grad(loss, list(layer.parameters()))])
    for one, other in zip(*found, strict=True):
        assert relative_rms(one, other) <= 1e-11
    layer, x = make("s4"), inputs(2, tokens)
    y = layer(x)[0]
    layer.convolves = True
    assert relative_rms(layer(x)[0], y) <= 1e-5
