"""Products of a few rows: where there is no Hopper, run on the CPU with copies in any order."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import SwiGLU, linears
from deltarule.nn import few_rows as nn_few_rows
from deltarule.ops.runtime import chained
from gluon_interpreter import interpret_launches
from promised import promised
from tolerance import relative_rms

promised("triton")

from deltarule.ops.fused import few_rows_gluon
from deltarule.ops.fused.convolution_step_triton import Stream, Within, convolution_step
from deltarule.ops.fused.few_rows_gluon import few_rows

HALF = torch.bfloat16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if HOPPER else "cpu"


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    if not HOPPER:
        interpret_launches(monkeypatch, torch.initial_seed, roles=False)


def drawn(*sizes):
    return torch.randn(sizes, device=DEVICE).to(HALF)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    # A tile a program; more than the ring holds; channels shared by two, the last ones cut off.
    ("rows", "outputs", "inputs", "programs"),
    [(2, 64, 128, 1), (32, 128, 1152, 2), (33, 64, 328, 4)],
)
def test_products_are_those_of_float64(rows, outputs, inputs, programs, gated, monkeypatch):
    monkeypatch.setattr(few_rows_gluon, "PROGRAMS", programs)
    x, weight = drawn(rows, inputs), drawn(outputs * (1 + gated), inputs) / inputs**0.5
    found = few_rows(x, weight, gated)
    exact = x.double() @ weight.double().mT
    if gated:
        # The halves are rounded before the gate is opened.
        gate, up = exact.to(HALF).double().split(outputs, 1)
        exact = F.silu(gate) * up
    assert relative_rms(found, exact) < 2**-8


@pytest.mark.parametrize("rows", [2, 32])
def test_convolutions_within_are_those_apart(rows):
    sizes, inputs = (64, 64, 128), 192
    x, weight = drawn(rows, inputs), drawn(320, inputs) / inputs**0.5
    taps, histories = tuple(drawn(d, 4) for d in sizes), tuple(drawn(rows, 3, d) for d in sizes)
    after = tuple(h.clone() for h in histories)
    found = few_rows(x, weight, within=Within(taps, after, True))
    *given, plain = few_rows(x, weight).split([*sizes, 64], 1)
    streams = zip(given, taps, histories, strict=True)
    apart = convolution_step(tuple(Stream(y[:, None], w, h, True) for y, w, h in streams))
    *found, others = found.split([*sizes, 64], 1)
    assert torch.equal(others, plain)
    for y, expected, own, theirs in zip(found, apart, after, histories, strict=True):
        if HOPPER:
            assert torch.equal(y, expected[:, 0])
        # Triton's interpreter rounds towards zero.
        torch.testing.assert_close(y, expected[:, 0], rtol=2**-7, atol=2**-9)
        assert torch.equal(own, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="cuBLAS multiplies a few rows here")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 5472), (9248, 2048), (16, 2048)])
def test_a_row_has_the_same_bits_in_every_company(outputs, inputs, gated):
    x, weight = drawn(64, inputs), drawn(outputs, inputs) / inputs**0.5
    whole = few_rows(x, weight, gated)
    for first, rows in ((0, 2), (3, 5), (1, 15), (0, 17), (7, 33), (31, 32)):
        part = slice(first, first + rows)
        assert torch.equal(few_rows(x[part], weight, gated), whole[part])
    with chained.chain(x.device):
        for _ in range(20):
            assert torch.equal(few_rows(x, weight, gated), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="cuBLAS multiplies a few rows here")
def test_layers_take_the_kernel(monkeypatch):
    mlp, x = SwiGLU(256, 704).to("cuda", HALF), drawn(4, 1, 256)
    with torch.no_grad():
        linears.adjoin(tuple(mlp.of_input().values()))
        found = mlp(x)
        asked, several = [], nn_few_rows.several
        note = lambda *given, **more: asked.append(more) or several(*given, **more)  # noqa: E731
        monkeypatch.setattr(nn_few_rows, "several", note)
        assert torch.equal(mlp(x), found)
        assert asked == [{"gated": True}, {}]
        # Off the copy engine's grid.
        theirs = mlp(torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x))
        assert len(asked) == 3
    exact = mlp.double()(x.double())
    assert relative_rms(found, exact) < 1.1 * relative_rms(theirs, exact)
