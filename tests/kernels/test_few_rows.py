"""Products of a few rows: those of float64, and a row's bits whatever rows stand beside it."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import SwiGLU, few_rows, linears
from deltarule.ops.runtime import chained
from tolerance import relative_rms


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


# One program, all channels; then channels shared by 2 and by 8 programs, the last ones cut off.
SIZES = [(2, 200, 72), (33, 37, 300), (5, 70, 1096)]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_products_are_those_of_float64(rows, outputs, inputs, device):
    from deltarule.ops.fused.few_rows_triton import few_rows

    x, weight = (
        torch.randn(rows, inputs, device=device),
        torch.randn(outputs, inputs, device=device),
    )
    assert relative_rms(few_rows(x, weight), x.double() @ weight.double().mT) < 1e-6


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_the_gate_is_opened_within_the_product(rows, outputs, inputs, device):
    from deltarule.ops.fused.few_rows_triton import few_rows

    x = torch.randn(rows, inputs, device=device) / inputs**0.5
    weight = torch.randn(2 * outputs, inputs, device=device)
    gate, up = (x.double() @ weight.double().mT).split(outputs, 1)
    assert relative_rms(few_rows(x, weight, gated=True), F.silu(gate) * up) < 1e-6


@pytest.mark.parametrize("rows", [2, 3, 32])
def test_convolutions_within_are_those_apart_to_the_bit(rows, device):
    from deltarule.ops.fused.convolution_step_triton import Stream, Within, convolution_step
    from deltarule.ops.fused.few_rows_triton import few_rows

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
    from deltarule.ops.fused.few_rows_triton import few_rows

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
        monkeypatch.setattr(few_rows, "MOST_ROWS", 1)
        theirs = mlp(x)
    exact = mlp.double()(x.double())
    assert relative_rms(found, exact) < 1.1 * relative_rms(theirs, exact)
