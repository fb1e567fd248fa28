"""Products and convolutions of one row or a few, whatever stands beside them."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import ShortConv, SwiGLU, linears
from deltarule.nn import few_rows as nn_few_rows
from deltarule.nn.short_conv import step_in_place
from deltarule.ops.fused import short_conv
from deltarule.ops.runtime import chained
from deltarule.ops.runtime.chained import UNREAD, read_early
from promised import promised
from tolerance import relative_rms

promised("triton")

from deltarule.ops.fused.convolution_step_triton import Stream, Within, convolution_step
from deltarule.ops.fused.few_rows_triton import few_rows
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


# One program, all channels; then channels shared by 2 and by 8 programs, the last ones cut off.
SIZES = [(2, 200, 72), (33, 37, 300), (5, 70, 1096)]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_products_of_a_few_rows_are_those_of_float64(rows, outputs, inputs, device):
    sizes = (rows, inputs), (outputs, inputs)
    x, weight = (torch.randn(size, device=device) for size in sizes)
    assert relative_rms(few_rows(x, weight), x.double() @ weight.double().mT) < 1e-6


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_the_gate_is_opened_within_the_product(rows, outputs, inputs, device):
    x = torch.randn(rows, inputs, device=device) / inputs**0.5
    weight = torch.randn(2 * outputs, inputs, device=device)
    gate, up = (x.double() @ weight.double().mT).split(outputs, 1)
    assert relative_rms(few_rows(x, weight, gated=True), F.silu(gate) * up) < 1e-6


@pytest.mark.parametrize("rows", [2, 3, 32])
def test_convolutions_within_are_those_apart_to_the_bit(rows, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes, inputs = (128, 128, 256), 320

    def drawn(*sizes):
        return torch.randn(*sizes, device=device).to(dtype)

    x, weight = drawn(rows, inputs), drawn(560, inputs) / inputs**0.5
    taps, histories = [tuple(drawn(*n, d) for d in sizes) for n in ((4,), (rows, 3))]
    taps, after = tuple(w.mT.contiguous() for w in taps), tuple(h.clone() for h in histories)

    found = few_rows(x, weight, within=Within(taps, after, True)).split([*sizes, 48], 1)
    *given, plain = few_rows(x, weight).split([*sizes, 48], 1)
    streams = zip(given, taps, histories, strict=True)
    apart = convolution_step(tuple(Stream(y[:, None], w, h, True) for y, w, h in streams))
    assert torch.equal(found[3], plain)
    for y, expected, own, theirs in zip(found, apart, after, histories, strict=False):
        assert torch.equal(y, expected[:, 0])
        assert torch.equal(own, theirs)


def halves(*sizes):
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 5472), (9248, 2048), (16, 2048)])
def test_a_row_has_the_same_bits_in_every_company(outputs, inputs, gated):
    x, weight = halves(64, inputs), halves(outputs, inputs) / inputs**0.5
    # Up to 16 rows channels are shared out in one way, and from 17 on in another.
    for most, parts in ((16, ((0, 2), (3, 5), (1, 15))), (64, ((0, 17), (7, 33), (31, 32)))):
        whole = few_rows(x[:most], weight, gated)
        for first, rows in parts:
            part = slice(first, first + rows)
            assert torch.equal(few_rows(x[part], weight, gated), whole[part])
        with chained.chain(x.device):
            for _ in range(20):
                assert torch.equal(few_rows(x[:most], weight, gated), whole)


@pytest.mark.gpu
def test_layers_take_the_kernel_on_hopper(monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuBLAS multiplies a few rows here")
    mlp, x = SwiGLU(256, 704).to("cuda", torch.bfloat16), halves(4, 1, 256)
    with torch.no_grad():
        linears.adjoin(tuple(mlp.of_input().values()))
        found = mlp(x)
        monkeypatch.setattr(nn_few_rows, "MOST_ROWS", 1)
        theirs = mlp(x)
    exact = mlp.double()(x.double())
    assert relative_rms(found, exact) < 1.1 * relative_rms(theirs, exact)


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


def test_a_chain_reads_a_state_early_once():
    mine, other = torch.zeros(2, 3), torch.zeros(3)
    assert not read_early(mine)
    token = UNREAD.set({mine.data_ptr()})
    assert not read_early(mine, other)
    assert read_early(mine)
    assert not read_early(mine)
    UNREAD.reset(token)
