"""Triton's kernels of the operators in contract.py, in the interpreter and on a GPU."""

from contextlib import nullcontext
from importlib import import_module
from typing import NamedTuple

import pytest
import torch

from deltarule import slstm
from deltarule.doctor.bars import FORWARD, GRADIENT
from deltarule.ops.dispatch import always
from deltarule.ops.memory.torch import triton_scan
from deltarule.ops.mesa import api as mesa_api
from deltarule.ops.selective_scan import api as scan_api
from deltarule.ops.slstm import api as slstm_api
from kernels.interpreted import interpreted
from opchecked import opcheck_all
from ops import memories
from ops.contract import (
    FORMS,
    Operator,
    Tensors,
    cells,
    convolution,
    gradients,
    least_squares,
    memory,
    scan,
    slots,
)
from promised import promised
from tolerance import assert_close, relative_rms
from truth import waits_for_nothing

promised("triton")

from deltarule.ops.memory.triton import passes as memory_kernels
from deltarule.ops.selective_scan.triton import passes as scan_kernels
from deltarule.ops.slstm.triton import split as split_cells

OPERATORS = {form: scan(form) for form in FORMS}
OPERATORS |= {f"{form}, signed": scan(form, signed=True) for form in ("mamba", "all")}
OPERATORS |= {"mesa": least_squares(iterations=18), "slstm": cells()}


class Memory(NamedTuple):
    """A memory by its sizes, and how its maps are held.

    Streamed maps come in blocks of 16 columns, the last of which is not whole; `share` is how many
    value channels a program has of a wide map.
    """

    operator: str
    maps: int = 1
    channels: int = 4
    inner: int = 7
    streamed: bool = False
    share: int = 0

    def of(self, size: int = 5) -> Operator:
        """In mini-batches of so many tokens."""
        return memory(self.operator, self.maps, size, self.channels, self.inner)


STREAMED = {
    f"{name}, {maps} streamed": Memory(name, maps, streamed=True)
    for name in ("ttt", "titans") for maps in (1, 2)
}  # fmt: skip
MEMORIES = {name: Memory(name) for name in ("ttt", "titans")} | STREAMED
# Three channels do not divide four.
SHARED = {f"titans, {n} values each": Memory("titans", share=n) for n in (2, 3)}
SHARED |= {f"{n}, wide": x._replace(channels=20, inner=40) for n, x in STREAMED.items()}
# On a GPU the sizes decide.
OF_TWO = {f"{name} of two maps": Memory(name, 2) for name in ("ttt", "titans")}
OPERATORS_ON_GPU = [*OPERATORS, "ttt", "titans", *OF_TWO]
# Keys and values that fill no tile, and several tiles of values.
SMALL = {
    "one channel": scan("all", key_size=1, value_size=1),
    "long keys": scan("all", key_size=40, value_size=3),
    "long values": scan("all", key_size=5, value_size=70),
    "wide cells": cells(40),
    # The definition's own sequence, not only its limit.
    "mesa, 2 iterations": least_squares(iterations=2),
    "mesa of 40 channels": least_squares(40, iterations=7),
}
WIDE = (64, 100, 256)
LARGE = {
    "200 channels": scan("all", key_size=200, value_size=3),
    "1500 channels": scan("all", key_size=1500, value_size=5),
    "300 values": scan("all", key_size=16, value_size=300),
    "a layer of Mamba": scan("mamba", key_size=16, value_size=1536),
    **{f"mesa of {size}": least_squares(size, iterations=40) for size in (64, 128)},
    **{f"slstm of {size}": cells(size) for size in WIDE},
    **{
        f"{name}, {maps} of {channels} ({inner}), {size} tokens":
        memory(name, maps, size, channels, inner)
        for name in ("ttt", "titans")
        for maps, channels, inner, size in (
            (1, 64, 0, 16), (1, 48, 0, 1), (1, 72, 0, 16), (1, 128, 0, 16), (2, 64, 256, 16),
            (2, 128, 130, 1),
        )
    },
}  # fmt: skip
# What runs in PyTorch on a GPU, and on the kernels of the delta rule.
OTHERS = {"two memories": slots(), **{f"{k} keys": convolution(k, 50) for k in (None, 1, 3)}}
here = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def each(here, there=()):
    """Tests of these operators in the interpreter, and of those on a GPU."""
    few = [pytest.param("cpu", name, marks=interpreted) for name in here]
    many = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in there]
    return pytest.mark.parametrize(("device", "operator"), [*few, *many], indirect=True)


every = each([*OPERATORS, *MEMORIES], OPERATORS_ON_GPU)
packed = pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
pytestmark = pytest.mark.filterwarnings("ignore:deltarule runs impl='torch' on a CUDA device")


@pytest.fixture(params=here)
def device(request, monkeypatch) -> str:
    """A GPU, or the interpreter with chunks so short that there is something to carry."""
    if request.param == "cpu":
        # The functions of these names hide their modules.
        of_memory = (import_module(f"deltarule.ops.memory.{name}") for name in ("ttt", "titans"))
        for module in (scan_api, mesa_api, slstm_api, *of_memory):
            runs = module.IMPLEMENTATIONS["triton"]._replace(why_not=always)
            monkeypatch.setitem(module.IMPLEMENTATIONS, "triton", runs)
        monkeypatch.setattr(memories, "H", 1)
        monkeypatch.setattr(memories, "HV", 2)
        monkeypatch.setattr(scan_kernels, "tokens_in_chunk", lambda inputs: 4)
        monkeypatch.setattr(scan_kernels, "HELD", 2)
    return request.param


def form_of(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A memory by its name, its maps held as they are to be."""
    form = (MEMORIES | SHARED | OF_TWO)[name]
    if device == "cpu" and form.streamed:
        monkeypatch.setattr(memory_kernels, "is_held", lambda *of: False)
        monkeypatch.setattr(memory_kernels, "COLUMNS", 16)
    if device == "cpu" and form.share:
        monkeypatch.setattr(triton_scan, "STREAMED_CHANNELS", form.share)
    return form


@pytest.fixture
def operator(request, device, monkeypatch) -> Operator:
    name = request.param
    return OPERATORS[name] if name in OPERATORS else form_of(name, device, monkeypatch).of()


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


def check(operator: Operator, x: Tensors, impl: str = "triton") -> None:
    """Outputs, final state and gradients in float32.

    Iterations and memories are as near as PyTorch's are. Products on a GPU are sums of three in
    tf32, which keep 22 of float32's 24 bits: 4 times PyTorch's roundings, beside those of the sums.
    """
    loose, near = (1, 4) if "regularizer" in x else (1, 0)
    if "position" in x:
        loose, near = (1, 2) if x["q"].device.type == "cpu" else (2, 5)
    exact = gradients(operator, exactly(x), impl="torch")
    found = gradients(operator, x, impl=impl)
    own = gradients(operator, x, impl="torch") if near else found
    parts = [list(enumerate(outputs)) + list(of.items()) for outputs, of in (found, own, exact)]
    for (name, y), (_, other), (_, expected) in zip(*parts, strict=True):
        bar = loose * (GRADIENT if isinstance(name, str) else FORWARD)[torch.float32]
        limit = max(bar, near * relative_rms(other, expected, floor=1e-9) if near else 0)
        assert relative_rms(y, expected, floor=1e-9) <= limit, name


@each([*OPERATORS, *MEMORIES, *SHARED], OPERATORS_ON_GPU)
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
    # From the suite's seed the terms of ttt's one step scale cancel: any float32 errs by 1e-4.
    torch.manual_seed(1)
    check(operator, drawn(operator, "cuda", packed=packed), impl)


@each(["slstm", *MEMORIES], ["slstm"])
def test_padded_rows(operator, device):
    """Whatever is computed there, of NaN too, nobody reads."""
    x = drawn(operator, device)
    lengths = torch.tensor([3, 9], device=device)
    there = torch.arange(x[operator.written].shape[1], device=device) < lengths[:, None]

    def run(**given: object) -> tuple[torch.Tensor, ...]:
        o, *states = operator.run(**given, lengths=lengths)
        return o.where(there.view(*there.shape, *[1] * (o.ndim - 2)), 0), *states

    if "position" in x:
        x["v"] = x["v"].masked_fill(~there[..., None, None], torch.nan)
    check(operator._replace(run=run), x)


# Of two tokens there are six, cut into groups between which memories are kept.
@pytest.mark.parametrize(("size", "tokens"), [(1, 5), (2, 12), (16, 5)])
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("device", here[:1], indirect=True)
def test_mini_batches_of_one_token_and_of_more_than_there_are(
    name, size, tokens, device, monkeypatch
):
    operator = form_of(name, device, monkeypatch).of(size)
    check(operator, drawn(operator, device, tokens=tokens))


@each(MEMORIES)
def test_steps_equal_the_whole(operator, device):
    x, state, steps = drawn(operator, device, tokens=7), (), []
    for t in range(7):
        o, *state = operator.run(**operator.part(x, t, t + 1, state), impl="triton")
        steps.append(o)
    assert relative_rms(torch.cat(steps, 1), operator.run(**x, impl="triton")[0]) < 1e-5


@each(["all", "slstm", *MEMORIES])
def test_sequences_do_not_see_their_neighbours(operator, device):
    """NaN in all of one packed sequence and its state reaches no number of another."""
    x = drawn(operator, device, packed=True)
    clean, x = operator.run(**x, impl="triton"), {name: y.clone() for name, y in x.items()}
    for name in operator.timed(x):
        x[name][:, 6:12] = torch.nan
    for name in operator.states:
        if x[name].is_floating_point():
            x[name][3] = torch.nan
    o, *states = operator.run(**x, impl="triton")
    assert torch.equal(o[:, :6], clean[0][:, :6])
    assert o[:, 6:12].isnan().all()
    for y, expected in zip(states, clean[1:], strict=True):
        assert torch.equal(y[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])


@each(["titans, 2 streamed"])
def test_inner_channels_far_from_zero_have_finite_gradients(operator, device):
    """Where the slope of GELU is 0 or 1, and that of tanh inside it some 1e8."""
    x = drawn(operator, device, tokens=5)
    x["weights_1"] *= 1e4
    x["beta"] *= 0
    _, found = gradients(operator, x, impl="triton")
    assert all(y.isfinite().all() for y in found.values())


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


ROUNDED = "all", "all constant", "mesa", "slstm"


@each([*ROUNDED, *MEMORIES], [*ROUNDED, "ttt", "titans", *OF_TWO])
def test_16_bits_are_rounded_once(operator, device):
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


@each(["mamba", "mesa", "slstm", *MEMORIES], ["mamba", "mesa", "slstm"])
@packed
def test_opcheck(operator, packed, device):
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


@each([], OPERATORS_ON_GPU)
def test_kernels_are_chosen_and_scans_wait_for_nothing(operator, device):
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
