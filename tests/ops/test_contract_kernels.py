"""Triton's kernels of the operators in contract.py, in the interpreter and on a GPU."""

from contextlib import nullcontext

import pytest
import torch

from deltarule import slstm
from deltarule.doctor.bars import FORWARD, GRADIENT
from deltarule.ops.dispatch import always
from deltarule.ops.mesa import api as mesa_api
from deltarule.ops.selective_scan import api as scan_api
from deltarule.ops.slstm import api as slstm_api
from opchecked import opcheck_all
from ops.contract import (
    FORMS,
    Operator,
    Tensors,
    cells,
    convolution,
    gradients,
    least_squares,
    scan,
    slots,
)
from promised import promised
from tolerance import assert_close, relative_rms
from truth import waits_for_nothing

promised("triton")

from deltarule.ops.selective_scan.triton import passes as scan_kernels
from deltarule.ops.slstm.triton import split as split_cells

OPERATORS = {form: scan(form) for form in FORMS}
OPERATORS |= {f"{form}, signed": scan(form, signed=True) for form in ("mamba", "all")}
OPERATORS |= {"mesa": least_squares(iterations=18), "slstm": cells()}
# Keys and values that fill no tile, and several tiles of values.
SMALL = {
    "one channel": scan("all", key_size=1, value_size=1),
    "long keys": scan("all", key_size=40, value_size=3),
    "long values": scan("all", key_size=5, value_size=70),
    "wide cells": cells(40),
}
WIDE = (64, 100, 256)
LARGE = {
    "200 channels": scan("all", key_size=200, value_size=3),
    "1500 channels": scan("all", key_size=1500, value_size=5),
    "300 values": scan("all", key_size=16, value_size=300),
    "a layer of Mamba": scan("mamba", key_size=16, value_size=1536),
    **{f"mesa of {size}": least_squares(size, iterations=40) for size in (64, 128)},
    **{f"slstm of {size}": cells(size) for size in WIDE},
}
# What runs in PyTorch on a GPU, and on the kernels of the delta rule.
OTHERS = {"two memories": slots(), **{f"{k} keys": convolution(k, 50) for k in (None, 1, 3)}}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
here = [pytest.param("cpu", marks=no_gpu), pytest.param("cuda", marks=pytest.mark.gpu)]
every = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
packed = pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
pytestmark = pytest.mark.filterwarnings("ignore:deltarule runs impl='torch' on a CUDA device")


@pytest.fixture(params=here)
def device(request, monkeypatch) -> str:
    """A GPU, or the interpreter with chunks so short that there is something to carry."""
    if request.param == "cpu":
        for module in (scan_api, mesa_api, slstm_api):
            runs = module.IMPLEMENTATIONS["triton"]._replace(why_not=always)
            monkeypatch.setitem(module.IMPLEMENTATIONS, "triton", runs)
        monkeypatch.setattr(scan_kernels, "tokens_in_chunk", lambda inputs: 4)
        monkeypatch.setattr(scan_kernels, "HELD", 2)
    return request.param


def drawn(operator: Operator, device: str, dtype=torch.float32, packed=False, tokens=0) -> Tensors:
    """A call of a few tokens in the interpreter, of more than a chunk on a GPU."""
    few = device == "cpu"
    lengths = (5, 0, 1, 6, 0) if few else (3, 0, 150, 1, 70)
    x = operator.draw(2, tokens or (9 if few else 150), lengths if packed else None)
    if "gates" in x:
        x["gates"], x["recurrent"] = x["gates"] / 4, x["recurrent"] / x["gates"].shape[-1]
    elif "k" in x:
        # Writes along a long key must not overshoot.
        x["k"] = x["k"] / max(1, x["k"].shape[-1] / 3) ** 0.5
    kinds = {name: dtype if name in operator.narrow else torch.float32 for name in x}
    return {n: y.to(device, kinds[n] if y.is_floating_point() else y.dtype) for n, y in x.items()}


def exactly(x: Tensors) -> Tensors:
    return {n: y.double() if y.is_floating_point() else y for n, y in x.items()}


def check(operator: Operator, x: Tensors, impl: str = "triton", **options: object) -> None:
    """Outputs, final state and gradients in float32; iterations as near as PyTorch's are."""
    near = 4 if "regularizer" in x else 0
    exact = gradients(operator, exactly(x), impl="torch", **options)
    found = gradients(operator, x, impl=impl, **options)
    own = gradients(operator, x, impl="torch", **options) if near else found
    parts = [list(enumerate(outputs)) + list(of.items()) for outputs, of in (found, own, exact)]
    for (name, y), (_, other), (_, expected) in zip(*parts, strict=True):
        if name == 0 and "lengths" in options:
            there = torch.arange(y.shape[1], device=y.device) < options["lengths"][:, None]
            y, other, expected = (part[there] for part in (y, other, expected))
        bar = (GRADIENT if isinstance(name, str) else FORWARD)[torch.float32]
        limit = max(bar, near * relative_rms(other, expected, floor=1e-9))
        assert relative_rms(y, expected, floor=1e-9) <= limit, name


@every
@packed
def test_float32(operator, packed, device):
    check(operator, drawn(operator, device, packed=packed))


@pytest.mark.parametrize("name", SMALL)
def test_small_sizes(name, device):
    check(SMALL[name], drawn(SMALL[name], device, tokens=5))


@pytest.mark.gpu
@packed
@pytest.mark.parametrize("name", [*LARGE, *OTHERS])
def test_large_sizes(name, packed):
    operator, impl = (LARGE | OTHERS)[name], "auto" if name in OTHERS else "triton"
    check(operator, drawn(operator, "cuda", packed=packed), impl)


def test_padded_rows(device):
    lengths = torch.tensor([3, 9], device=device)
    check(OPERATORS["slstm"], drawn(OPERATORS["slstm"], device), lengths=lengths)


@packed
@pytest.mark.parametrize("size", [5, 40, *(pytest.param(n, marks=pytest.mark.gpu) for n in WIDE)])
def test_heads_split_over_programs(size, packed, device, monkeypatch):
    """One program, three of 16 channels, and on a GPU as many as there are of wide heads."""
    monkeypatch.setattr(split_cells, "IN_TURNS", True)
    if device == "cpu":
        monkeypatch.setattr(split_cells, "HELD", 1024)
    ran = []
    for name in ("forward", "backward"):
        run = getattr(split_cells, name)
        monkeypatch.setattr(split_cells, name, lambda *a, run=run: (ran.append(run), run(*a))[1])
    check(cells(size), drawn(cells(size), device, packed=packed))
    assert len(ran) == 2


def test_small_writes_keep_their_digits(device):
    """Means of tanh(z) with z near 1e-4: beside 1 it has no digit to lose."""
    gates = torch.randn(2, 9, 2, 4, 5)
    gates[:, :, :, 2] *= 1e-4
    o = slstm(gates.to(device), torch.zeros(2, 4, 5, 5, device=device), impl="triton").o
    exact = slstm(gates.double(), torch.zeros(2, 4, 5, 5).double(), impl="reference").o
    assert relative_rms(o, exact) <= FORWARD[torch.float32]


@pytest.mark.parametrize("name", ["all", "all constant", "mesa", "slstm"])
def test_16_bits_are_rounded_once(name, device):
    operator = OPERATORS[name]
    # The interpreter cuts bfloat16 where a GPU rounds.
    for dtype in (torch.float16,) if device == "cpu" else (torch.float16, torch.bfloat16):
        x = drawn(operator, device, dtype)
        (o, *_), found = gradients(operator, x, impl="triton")
        (expected, *_), exact = gradients(operator, exactly(x), impl="torch")
        unit = torch.finfo(dtype).eps
        assert o.dtype == dtype
        assert relative_rms(o, expected) < unit
        for leaf, gradient in found.items():
            assert gradient.dtype == x[leaf].dtype
            assert relative_rms(gradient, exact[leaf]) < 2 * unit, leaf


@every
def test_runs_are_equal_bit_by_bit_and_causal(operator, device):
    x = drawn(operator, device)
    outputs, first = gradients(operator, x, impl="triton")
    again, second = gradients(operator, x, impl="triton")
    assert all(map(torch.equal, outputs, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in operator.timed(x):
        x[name] = x[name].clone()
        x[name][:, 6:] *= 0.5
    o = operator.run(**x, impl="triton")[0]
    # Conjugate gradients of a chunk end together.
    assert operator.shared > 1 or torch.equal(o[:, :6], outputs[0][:, :6])
    assert not torch.equal(o[:, 6:], outputs[0][:, 6:])


@pytest.mark.parametrize("name", ["all", "all constant", "none"])
def test_views_of_any_strides(name, device):
    operator = OPERATORS[name]
    x = drawn(operator, device)
    turned = {name: y.transpose(0, -1).contiguous().transpose(0, -1) for name, y in x.items()}
    for y, expected in zip(
        operator.run(**turned, impl="triton"), operator.run(**x, impl="triton"), strict=True
    ):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("name", ["all", "slstm", "mesa"])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_chunk_or_less(name, tokens, device):
    operator = OPERATORS[name]
    check(operator, operator.part(drawn(operator, device), 0, tokens))


def test_resets(device):
    x = drawn(OPERATORS["dfw"], device)
    x["log_decay"][:, 3::5] = -torch.inf
    x["value_log_decay"][:, 7] = -1e6
    check(OPERATORS["dfw"], x)


@pytest.mark.parametrize("name", ["mamba", "mesa", "slstm"])
@packed
def test_opcheck(name, packed, device):
    operator = OPERATORS[name]
    x = drawn(operator, device, packed=packed)
    tests = ("test_schema", "test_faketensor")
    assert opcheck_all(lambda: gradients(operator, x, impl="triton"), tests)


def test_without_saved_states_the_forward_runs_again(device):
    x = drawn(OPERATORS["all"], device, tokens=5)
    given = scan_kernels.ScanInputs(
        *(x.get(name) for name in scan_kernels.ScanInputs._fields[:9]), None, 0.5, False
    )
    o, final, saved = scan_kernels.forward(given, True)
    assert saved.shape == scan_kernels.saved_shape(given)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    kept, recomputed = (
        scan_kernels.backward(d_o, d_final, given, states) for states in (saved, saved[:0])
    )
    assert all(map(torch.equal, kept, recomputed))


@pytest.mark.gpu
@every
def test_kernels_are_chosen_and_scans_wait_for_nothing(operator):
    x = drawn(operator, "cuda", torch.bfloat16, packed=True)
    expected = operator.run(**x, impl="triton")
    is_scan = operator.run is OPERATORS["all"].run
    x["cu_seqlens"] = x["cu_seqlens"].cuda()
    with waits_for_nothing() if is_scan else nullcontext():
        found = operator.run(**x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["all", "mesa"])
def test_a_kernel_inside_a_compiled_function(name):
    operator = OPERATORS[name]
    x = drawn(operator, "cuda")

    def loss(k):
        return operator.run(**(x | {"k": k}), impl="triton")[0].square().sum()

    k = x["k"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(k), k)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(k), k)
    assert_close(found, expected.double(), dtype=torch.float32, gradient=True)
