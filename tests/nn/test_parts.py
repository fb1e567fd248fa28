"""Norms, short convolutions and rotary positions, each against its equation."""

import math

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import RMSNorm, ShortConv, State
from deltarule.nn import norm as norms
from deltarule.nn.layout import make_layout
from deltarule.nn.norm import GatedRMSNorm, GroupRMSNorm
from deltarule.nn.rotation import angles, angles_by_integers, rotate
from deltarule.nn.short_conv import at_once, short_convolution
from nn.layers import HIDDEN, make
from oracles import rotary
from tolerance import relative_rms


def rms_norm(x, eps):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def test_rms_norm():
    norm, x = RMSNorm(7, eps=1e-3).double(), torch.randn(2, 3, 7, dtype=torch.float64)
    norm.weight.data.copy_(torch.randn(7))
    assert relative_rms(norm(x), norm.weight * rms_norm(x, 1e-3)) <= 1e-12


def test_rms_norm_of_bfloat16_rounds_once():
    x = torch.randn(100, 64)
    y = RMSNorm(64).bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert relative_rms(y, rms_norm(x.bfloat16().double(), 1e-5)) < 2**-8


def test_gated_norm():
    x, gate = torch.randn(2, 3, 2, 7, dtype=torch.float64).unbind()
    for activation, function in (("silu", torch.nn.SiLU()), ("sigmoid", torch.nn.Sigmoid())):
        norm = GatedRMSNorm(7, 1e-5, activation).double()
        assert relative_rms(norm(x, gate), rms_norm(x, 1e-5) * function(gate)) <= 1e-12
        assert relative_rms(norm(x), rms_norm(x, 1e-5)) <= 1e-12


def test_group_norm_has_a_weight_for_each_channel():
    norm, x = GroupRMSNorm(2, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    norm.weight.data.copy_(torch.arange(6))
    expected = torch.cat([rms_norm(part, 1e-5) for part in x.chunk(2, dim=-1)], dim=-1)
    assert relative_rms(norm(x), torch.arange(6) * expected) <= 1e-12


def test_a_norm_less_one_is_the_plain_one_and_loses_nothing_in_16_bits():
    x = torch.randn(3, 64)
    norm, plain = RMSNorm(64, zero_centered=True), RMSNorm(64)
    assert torch.equal(norm(x), plain(x))
    torch.nn.init.normal_(norm.weight, std=1e-3)
    plain.weight.data = 1 + norm.weight.data
    assert torch.equal(norm(x), plain(x))
    norm, half = norm.to(torch.bfloat16), x.to(torch.bfloat16)
    assert norms.scale_of(norm.weight, True).dtype == torch.float32
    # Rounded once: the weights, which 1 + w in 16 bits would lose, still tell.
    wide = RMSNorm(64, zero_centered=True)
    wide.weight.data = norm.weight.data.float()
    assert torch.equal(norm(half), wide(half.float()).to(torch.bfloat16))


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_equals_conv1d(size, tokens):
    conv, x = ShortConv(6, size).double(), torch.randn(2, tokens, 6, dtype=torch.float64)
    y, history = conv(x, conv.init_history(2), make_layout(x, None, None))
    padded = F.pad(x.mT, (size - 1, 0))
    expected = F.silu(F.conv1d(padded, conv.weight.unsqueeze(1), groups=6)).mT
    assert relative_rms(y, expected) <= 1e-12
    assert torch.equal(history, padded.mT[:, tokens:])


def test_history_is_no_view_of_the_input():
    conv, x = ShortConv(3, 4), torch.randn(1, 100, 3)
    _, history = conv(x, conv.init_history(1), make_layout(x, None, None))
    assert history.untyped_storage().nbytes() == 3 * 3 * 4


@pytest.mark.parametrize("other", [(8, 4, True), (8, 3, False), (8, 4, False, True)])
def test_streams_convolved_otherwise_are_each_on_its_own(other):
    modules = [ShortConv(8, 4, False), ShortConv(8, 4, False), ShortConv(*other)]
    streams, histories = [torch.randn(1, 1, 8)] * 3, [m.init_history(1) for m in modules]
    layout = make_layout(streams[0], None, None)
    assert at_once(modules, streams, histories, layout) is None
    modules[2] = ShortConv(8, 4, False)
    assert at_once(modules, streams, [*histories[:2], None], layout) is None
    histories[2] = modules[2].init_history(1)
    assert at_once(modules, streams, histories, layout) is not None
    modules[2].register_forward_hook(print)
    assert at_once(modules, streams, histories, layout) is None


@pytest.mark.parametrize("tokens", [1, 2, 300])
@pytest.mark.parametrize("afresh", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_written_out_are_those_of_conv1d_twice(tokens, afresh, bias):
    torch.manual_seed(0)
    conv, x = ShortConv(3, 4, bias=bias).double(), torch.randn(2, tokens, 3, dtype=torch.float64)
    if bias:
        torch.nn.init.normal_(conv.bias)
    history, layout = conv.init_history(2).double(), make_layout(x, None, None)
    leaves = [x, conv.weight, *([] if afresh else [history.normal_()]), *([conv.bias] * bias)]

    def ours(x, weight, *given):
        if afresh:
            return short_convolution(x, weight, None, layout, True, *given or [None])[0]
        before, *biases = given
        given = {"weight": weight, "bias": biases[0] if biases else None}
        return torch.func.functional_call(conv, given, (x, before, layout))[0]

    def theirs(x, weight, *given):
        before, *biases = (x.new_zeros(2, 3, 3), *given) if afresh else given
        rows = torch.cat([before, x], 1).mT
        return F.silu(F.conv1d(rows, weight.unsqueeze(1), *biases, groups=3)).mT

    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    first = [
        torch.autograd.grad(f(*leaves).sin().sum(), leaves, create_graph=True)
        for f in (ours, theirs)
    ]
    second = [torch.autograd.grad(sum(g.square().sum() for g in one), leaves) for one in first]
    for one, other in zip(first[0] + second[0], first[1] + second[1], strict=True):
        assert relative_rms(one, other) <= 1e-12


def test_bfloat16_tells_distant_neighbours_apart():
    x = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
    y = rotate(x, torch.tensor([[4000, 4001]]))
    assert not torch.equal(y[:, 0], y[:, 1])


@pytest.mark.parametrize("turned", [angles, angles_by_integers])
@pytest.mark.parametrize("position", [0, 5, 10**6, 10**9])
def test_angles_far_from_the_start(turned, position):
    expected = position * rotary.frequencies(16)
    found = turned(torch.tensor([[position]]), 8, 10000.0).double()
    assert ((found - expected + math.pi) % (2 * math.pi) - math.pi).abs().max() <= 4e-7


@pytest.mark.parametrize("shift", [10**6, 10**9])
def test_float32_rotates_as_float64_far_from_the_start(shift):
    x, positions = torch.randn(12, 16), torch.arange(12) + shift
    expected = rotary.rotate(x.double(), positions, rotary.frequencies(16))
    assert relative_rms(rotate(x[None, :, None], positions[None])[0, :, 0], expected) <= 5e-7


@pytest.mark.parametrize("shift", [10**6, 10**9])
@pytest.mark.parametrize("name", ["retnet", "sliding_window"])
def test_layers_do_not_see_a_shift(name, shift):
    layer, x = make(name).float(), torch.randn(2, 12, HIDDEN)
    state = layer.init_state(2)
    shifted = State(state, length=state["length"] + shift)
    with torch.no_grad():
        assert relative_rms(layer(x, shifted)[0], layer(x, state)[0].double()) <= 1e-6
