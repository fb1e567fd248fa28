"""Products of one row and convolutions of a few tokens, whatever stands beside them."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import ShortConv
from deltarule.nn import few_rows as nn_few_rows
from deltarule.nn.short_conv import step_in_place
from deltarule.ops.fused import short_conv
from deltarule.ops.runtime import chained
from deltarule.ops.runtime.chained import CHAIN, UNREAD, read_early
from promised import promised
from tolerance import relative_rms

promised("triton")

from deltarule.ops.fused.one_row_triton import normed_row, one_row


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (37, 1100), (1035, 33), (9, 5472)])
def test_products_of_one_row_are_those_of_float64(outputs, inputs, device):
    x, weight = torch.randn(inputs, device=device), torch.randn(outputs, inputs, device=device)
    assert relative_rms(one_row(x, weight), weight.double() @ x.double()) < 1e-6
    rounded = one_row(x.bfloat16(), weight.bfloat16())
    # The interpreter rounds towards zero.
    exact = weight.bfloat16().double() @ x.bfloat16().double()
    assert relative_rms(rounded, exact) < 2**-7


def test_what_stands_before_a_product_is_made_within_it(device):
    def drawn(*sizes):
        return torch.randn(*sizes, device=device)

    def norm(x, scale, eps=1e-3):
        x = x.double()
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale.double()

    gate, up = drawn(2, 1100)
    weight, residual = drawn(21, 1100), drawn(21)
    expected = weight.double() @ (F.silu(gate.double()) * up.double()) + residual.double()
    assert relative_rms(one_row(gate, weight, up, residual), expected) < 1e-6
    x, opened = drawn(3, 60)[..., :20], drawn(3, 40)[..., 20:]
    weight, scale = drawn(21, 60), drawn(20)
    for act, gated in (("silu", F.silu), ("sigmoid", torch.sigmoid), ("none", None)):
        factor = 1 if gated is None else gated(opened.double())
        expected = weight.double() @ (norm(x, scale) * factor).flatten() + residual.double()
        given = None if gated is None else opened
        found = normed_row(x, scale, 1e-3, weight, given, act, residual)
        assert relative_rms(found, expected) < 1e-6


@pytest.mark.gpu
def test_one_row_on_a_gpu_takes_the_kernel():
    x, weight = torch.randn(1, 1, 64, device="cuda"), torch.randn(48, 64, device="cuda")
    with torch.no_grad():
        y = nn_few_rows.product(x, weight)
    assert y.shape == (1, 1, 48)
    assert relative_rms(y, x.double() @ weight.double().mT) < 1e-6


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_streams_are_convolved_as_each_alone(tokens, dtype, device):
    sizes, batch = (130, 24, 256), 2
    modules = [ShortConv(size, 4, activated=size > 24).to(device) for size in sizes]
    packed = torch.randn(batch, tokens, sum(sizes), device=device).to(dtype)
    streams = packed.split(sizes, dim=-1)
    histories = [torch.randn(batch, 3, size, device=device).to(dtype) for size in sizes]
    expected = [
        short_conv.short_conv(x, m.weight, history.clone(), None, None, None, m.activated)
        for m, x, history in zip(modules, streams, histories, strict=True)
    ]
    with torch.no_grad():
        found = step_in_place(modules, streams, histories)
    for y, history, (y_alone, history_alone) in zip(found, histories, expected, strict=True):
        assert torch.equal(y, y_alone)
        assert torch.equal(history, history_alone)


def test_a_kernel_follows_the_one_before_without_a_chain(monkeypatch):
    device = torch.device("cpu")
    assert chained.following(device) == {"CHAINED": False, "FOLLOWS": False}
    monkeypatch.setattr(chained, "can_follow", lambda device: True)
    assert chained.following(device) == {"CHAINED": False, "FOLLOWS": True, "launch_pdl": True}
    token = CHAIN.set(True)
    assert chained.following(device) == {"CHAINED": True, "FOLLOWS": False, "launch_pdl": True}
    CHAIN.reset(token)


def test_a_chain_reads_a_state_early_once():
    mine, other = torch.zeros(2, 3), torch.zeros(3)
    assert not read_early(mine)
    token = UNREAD.set({mine.data_ptr()})
    assert not read_early(mine, other)
    assert read_early(mine)
    assert not read_early(mine)
    UNREAD.reset(token)
