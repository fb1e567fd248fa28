"""Products of a few rows whose tiles come through a ring: run on the CPU, copies in any order."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from promised import promised

promised("triton")

from deltarule.ops.fused import few_rows_triton
from deltarule.ops.fused.convolution_step_triton import Stream, Within, convolution_step
from deltarule.ops.runtime.gluon_tiles import FusedLaunch
from gluon_interpreter import Descriptor, Machine, Pointer, interpreted

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Every program is one role, which waits for copies alone."""

    def call(self, grid, *arguments):
        tiles = {self.kernel.arg_names[place]: of for place, *of in self.tiles}
        named = dict(zip(self.kernel.arg_names, arguments, strict=False))
        known = {name: x for name, x in self.constants.items() if name in self.kernel.arg_names}
        for program in range(grid[0]):
            machine = Machine(program, torch.initial_seed() + program, grid[0])
            given = known | {
                name: Pointer(x) if isinstance(x, torch.Tensor) else x for name, x in named.items()
            }
            given |= {name: Descriptor(named[name], *of) for name, of in tiles.items()}
            machine.specialize([(partial(interpreted(self.kernel, machine), **given), ())])

    monkeypatch.setattr(FusedLaunch, "__call__", call)
    monkeypatch.setattr(few_rows_triton, "takes_ring", lambda *_: True)


def drawn(*sizes):
    return torch.randn(sizes).to(HALF)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    # A tile a program; more than the ring holds; channels shared by two, the last ones cut off.
    ("rows", "outputs", "inputs", "programs"),
    [(16, 64, 128, 1), (32, 128, 1152, 2), (64, 64, 328, 4)],
)
def test_products_are_those_of_float64(rows, outputs, inputs, programs, gated, monkeypatch):
    monkeypatch.setitem(few_rows_triton.PROGRAMS, True, programs)
    x, weight = drawn(rows, inputs), drawn(outputs * (1 + gated), inputs) / inputs**0.5
    found = few_rows_triton.few_rows(x, weight, gated)
    exact = x.double() @ weight.double().mT
    if gated:
        # The halves are rounded before the gate is opened.
        gate, up = exact.to(HALF).double().split(outputs, 1)
        exact = F.silu(gate) * up
    error = (found.double() - exact).square().mean() / exact.square().mean()
    assert error.sqrt() < 2**-8


def test_convolutions_within_are_those_apart():
    rows, sizes, inputs = 16, (64, 64, 128), 192
    x, weight = drawn(rows, inputs), drawn(320, inputs) / inputs**0.5
    taps, histories = tuple(drawn(d, 4) for d in sizes), tuple(drawn(rows, 3, d) for d in sizes)
    after = tuple(h.clone() for h in histories)
    found = few_rows_triton.few_rows(x, weight, within=Within(taps, after, True))
    *given, plain = few_rows_triton.few_rows(x, weight).split([*sizes, 64], 1)
    streams = zip(given, taps, histories, strict=True)
    apart = convolution_step(tuple(Stream(y[:, None], w, h, True) for y, w, h in streams))
    *found, others = found.split([*sizes, 64], 1)
    assert torch.equal(others, plain)
    for y, expected, own, theirs in zip(found, apart, after, histories, strict=True):
        torch.testing.assert_close(y, expected[:, 0], rtol=2**-7, atol=2**-9)
        assert torch.equal(own, theirs)
