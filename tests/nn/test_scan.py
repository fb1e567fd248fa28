"""Layers over `selective_scan`: convolutions, chunks and groups of channels that change nothing."""

import pytest
import torch
import torch.nn.functional as F

import deltarule
from deltarule.nn import s4d
from deltarule.nn.layout import make_layout
from deltarule.nn.rotation import turned
from deltarule.nn.s4d import filtered
from nn.layers import HIDDEN, call_of, inputs, make
from nn.test_by_hand import end_of_block, values
from tolerance import relative_rms

DOUBLE = torch.float64
T = 10
# Logits that have no exponential, and gates that close.
EXTREME = {
    "abc": lambda layer: layer.s_proj.weight.mul_(1e3),
    "rg_lru": lambda layer: layer.a_bias.fill_(-200.0),
}


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


@pytest.mark.parametrize("name", ["mamba1", "signed_mamba1", "s4", "longhorn_released"])
def test_grouping_of_the_channels_changes_nothing(name):
    x = inputs(2, 7, DOUBLE)
    layer, grouped = make(name, DOUBLE, num_heads=1), make(name, DOUBLE, num_heads=4)
    given = {key: p.view_as(grouped.state_dict()[key]) for key, p in layer.state_dict().items()}
    grouped.load_state_dict(given)
    assert relative_rms(grouped(x)[0], layer(x)[0]) <= 1e-12


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
    layer, x = make("s4"), inputs(1, tokens)
    calls = (
        {},
        {"cu_seqlens": torch.tensor([0, 5, 5, tokens])},
        {"mask": inputs(1, tokens)[..., 0] > 0},
    )
    for given in calls:
        kept = given.get("mask", ...)
        for layer.convolves in (False, True):
            y, state = layer(x, **given)
            found[layer.convolves] = [y[kept], state["recurrent"]]
        assert all(relative_rms(*pair) <= 1e-5 for pair in zip(*found[::-1], strict=True))


@pytest.mark.parametrize(("name", "change"), EXTREME.items())
def test_extreme_logits_are_finite_and_so_are_all_gradients(name, change):
    layer, x = make(name), inputs(2, 50).requires_grad_()
    with torch.no_grad():
        change(layer)
    y, state = layer(x)
    assert name != "abc" or state["log_sum"].max() > 1e3
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))


@torch.no_grad()
def test_rwkv4_forgets_nothing_that_is_large_in_float32():
    exact, layer, x = make("rwkv4", DOUBLE), make("rwkv4"), inputs(1, 12, DOUBLE)
    exact.k_proj.weight *= 100
    layer.load_state_dict(exact.state_dict())
    assert relative_rms(layer(x.float())[0], exact(x)[0]) <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2, 64, 200])
def test_chunks_are_the_scan(tokens):
    layer, v = make("s4d", DOUBLE), torch.randn(2, tokens, 2, HIDDEN, dtype=DOUBLE)
    given = layer.filters()
    layout, state = make_layout(v.flatten(2), None, None), layer.init_state(2)["recurrent"]
    y, last = filtered(v, given, state, layout)
    expected = deltarule.selective_scan(**s4d.arguments(v, given), impl="reference")
    assert relative_rms(y, expected.o.view_as(y)) <= 1e-12
    turned_back = turned(expected.final_state.view_as(last), tokens * given.angle)
    assert relative_rms(last, turned_back) <= 1e-11


@torch.no_grad()
def test_it_is_a_convolution():
    """Nothing depends on the input: `long_convolution` with the filter of each channel."""
    layer, x = make("s4d", DOUBLE), inputs(1, T, DOUBLE)
    v = values(layer, x[0])
    y, _ = deltarule.ops.long_convolution(v[None, ..., None], layer.taps(len(v)))
    assert relative_rms(layer(x)[0][0], end_of_block(layer, x[0], v, y[0, ..., 0])) <= 1e-11


@torch.no_grad()
def test_small_steps_are_held_without_cancellation():
    layer = make("s4d")
    layer.log_step.fill_(-12.0)
    exact = make("s4d", DOUBLE)
    exact.load_state_dict(layer.state_dict())
    assert relative_rms(layer.filters().b, exact.filters().b) <= 1e-6


@torch.no_grad()
def test_float32_keeps_its_precision_over_many_turns():
    layer, x = make("s4d", head_k_dim=32), inputs(1, 3000)
    exact = make("s4d", DOUBLE, head_k_dim=32)
    exact.load_state_dict(layer.state_dict())
    assert relative_rms(layer(x)[0], exact(x.double())[0]) <= 3e-6


def test_s4d_scans_in_float32_under_autocast():
    layer, x = make("s4d"), inputs(2, 100)
    v = layer.values(call_of(layer, x))
    plain, cast = call_of(layer, x), call_of(layer, x)
    y = layer.scanned(v, layer.by_head(v), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.scanned(v, layer.by_head(v), cast), y)
    assert torch.equal(cast.after["recurrent"], plain.after["recurrent"])
