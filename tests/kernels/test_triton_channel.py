"""Decay per channel and the free erase in Triton, under the interpreter, against the definition."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltarule import pack
from deltarule.ops.delta_rule import chunked
from oracle import Case, make_case, run_module, weights, with_gradients
from promised import promised
from tolerance import assert_close, assert_close_to_yardstick, relative_rms

promised("triton")

import triton
import triton.language as tl

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import channel_decay, channel_stages, passes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_on_gpu"
)
KINDS = [
    *(("channel", "none", n) for n in (1, 3)), *(("channel", "tied", n) for n in (1, 2, 3, 4)),
    *((decay, "free", 1) for decay in ("none", "constant", "head", "channel")),
]  # fmt: skip


def call_inputs(case: Case) -> Inputs:
    x, shape = case.tensors, case.tensors["q"].shape
    log_decay = x["log_decay"]
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(*shape[:2], -1)
    return Inputs(
        x["q"], x["k"], x["v"], x["beta"], x["a"], x["b"], log_decay, x["initial_state"],
        None if case.lengths is None else pack(case.lengths), case.n_steps, shape[-1] ** -0.5,
        case.normalize_qk, False,
    )  # fmt: skip


def run(
    case: Case, d_o: torch.Tensor, d_state: torch.Tensor, save: bool = True
) -> dict[str, torch.Tensor]:
    """o, the final state and every gradient."""
    inputs = call_inputs(case)
    o, final, saved = passes.forward(inputs, save)
    gradients = passes.backward(d_o.to(o.dtype), d_state.float(), inputs, saved)
    out = {"o": o, "final_state": final}
    names = ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")
    out |= {f"d{name}": x for name, x in zip(names, gradients, strict=True) if x is not None}
    constant = case.tensors["log_decay"] is not None and case.tensors["log_decay"].ndim == 1
    if constant:
        out["dlog_decay"] = out["dlog_decay"].sum((0, 1))
    return out


def expected(case: Case, d_o: torch.Tensor, d_state: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same from the definition in float64."""
    exact = case.to(torch.float64)
    out, gradients = with_gradients(exact, "reference", d_o.double(), d_state.double())
    gradients = {f"d{name}": x for name, x in gradients.items()}
    return {"o": out.o, "final_state": out.final_state} | gradients


def check(case: Case) -> None:
    d_o, d_state = (x.float() for x in weights(case))
    exact = expected(case, d_o, d_state)
    for name, x in run(case, d_o, d_state).items():
        # A constant decay's gradient adds up those of all tokens, most of which cancel.
        floor = 10.0 if x.ndim == 1 else 0.0
        gradient = name.startswith("d")
        assert_close(x, exact[name], dtype=torch.float32, gradient=gradient, name=name, floor=floor)


def small(decay: str, erase: str, **sizes: object) -> Case:
    """One head, a chunk and a bit."""
    defaults = {"batch": 1, "heads": 1, "value_heads": 1, "tokens": 66, "key_size": 5}
    return make_case(decay, erase, **defaults | sizes, dtype=torch.float32)


@pytest.mark.parametrize(("decay", "erase", "n_steps"), KINDS)
def test_every_decay_and_erase(decay: str, erase: str, n_steps: int) -> None:
    norm = erase != "free" and n_steps % 2 == 1
    check(small(decay, erase, n_steps=n_steps, normalize_qk=norm))


@pytest.mark.parametrize("erase", ["tied", "free"])
def test_packed_sequences(erase: str) -> None:
    check(small("channel", erase, lengths=(3, 0, 66, 1)))


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (17, 70), (40, 3)])
def test_any_sizes_and_more_value_heads(key_size: int, value_size: int) -> None:
    sizes = {"key_size": key_size, "value_size": value_size, "tokens": 20}
    check(small("channel", "free", **sizes, value_heads=2))
    check(small("channel", "tied", **sizes, batch=2, heads=2, value_heads=4))


@pytest.mark.parametrize(
    ("spacing", "strength"), [(1, -1e4), (2, -torch.inf), (7, -1e6), (40, -1e4), (16, -torch.inf)]
)
@pytest.mark.parametrize(("erase", "n_steps"), [("tied", 2), ("free", 1)])
def test_resets(erase: str, n_steps: int, spacing: int, strength: float) -> None:
    case = small("channel", erase, n_steps=n_steps, tokens=66 // n_steps)
    case.tensors["log_decay"][:, ::spacing, ::2] = strength
    check(case)


def check_roughly(case: Case, size: float = 1.0, save: bool = True) -> None:
    """As `check`; a sum of logarithms over 2^7 is good to 2^-17, and meets another one."""
    d_o, d_state = (x.float() * size for x in weights(case))
    exact = expected(case, d_o, d_state)
    for name, x in run(case, d_o, d_state, save).items():
        assert relative_rms(x, exact[name]) < 3e-5, name


class Unlaunched:
    """A kernel that does nothing."""

    arg_names, fn = ("q",), staticmethod(lambda q: None)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for bfloat16 take float32, which has room for less."""
    monkeypatch.setattr(channel_stages, "has_fast_form", lambda inputs: inputs.erase != "free")
    monkeypatch.setattr(channel_stages, "SHIFT", 0.0)
    monkeypatch.setattr(channel_stages, "RANGE", 100.0)


# Flagged rows overflow, and are not used.
overflows = pytest.mark.filterwarnings(
    "ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
FAST = [
    ("tied", {"n_steps": 2, "tokens": 33, "normalize_qk": True}),
    ("tied", {"lengths": (3, 0, 70), "value_heads": 2, "key_size": 40, "value_size": 70}),
    ("tied", {"n_steps": 3, "tokens": 23, "value_size": 150}),
    ("tied", {"n_steps": 4, "tokens": 17, "batch": 2, "heads": 2, "value_heads": 4}),
    ("none", {"tokens": 130, "normalize_qk": True, "key_size": 70}),
    ("none", {"tokens": 66, "value_heads": 2, "value_size": 140}),
]


@pytest.mark.parametrize(("erase", "sizes"), FAST)
def test_fast_chunks(
    monkeypatch: pytest.MonkeyPatch, in_float32: None, erase: str, sizes: dict[str, Any]
) -> None:
    monkeypatch.setattr(channel_stages, "flagged_scores_kernel", Unlaunched())
    monkeypatch.setattr(channel_stages, "exact_gradients_kernel", Unlaunched())
    case = small("channel", erase, **sizes)
    # -95 as a power of 2 over a part of the first chunk, of at most -100.
    case.tensors["log_decay"] *= 0.01
    case.tensors["log_decay"][:, 1:8, ::2] = -95 * math.log(2) / 7
    check_roughly(case)


@overflows
@pytest.mark.parametrize(("of", "save"), [(0, True), (1, False), (4, False)])
def test_flagged_chunks_of_blocks_above_the_bar(in_float32: None, of: int, save: bool) -> None:
    erase, sizes = FAST[of]
    case = small("channel", erase, **sizes)
    # -40 as a power of 2 in each of a chunk's four blocks of 16 rows.
    case.tensors["log_decay"][..., ::2] = -2.5 * math.log(2) * case.n_steps
    check_roughly(case, save=save)


@overflows
@pytest.mark.parametrize(("erase", "sizes"), FAST)
def test_fast_and_flagged_chunks(in_float32: None, erase: str, sizes: dict[str, Any]) -> None:
    case = small("channel", erase, **sizes)
    case.tensors["log_decay"][:, 5, 1::2] = -59.0
    case.tensors["log_decay"][:, 6:11, ::2] = -21.0
    check_roughly(case)


@overflows
@pytest.mark.parametrize(
    ("spacing", "strength"), [(1, -1e4), (2, -torch.inf), (7, -1e6), (40, -1e4), (16, -torch.inf)]
)
def test_resets_of_flagged_chunks(in_float32: None, spacing: int, strength: float) -> None:
    # The second chunk has no reset.
    case = small("channel", "tied", n_steps=2, tokens=70, value_heads=2)
    case.tensors["log_decay"][:, :32:spacing, ::2] = strength
    check_roughly(case)


@overflows
def test_more_chunks_with_flagged_rows_than_programs(
    monkeypatch: pytest.MonkeyPatch, in_float32: None
) -> None:
    monkeypatch.setattr(channel_stages, "PROGRAMS", 2)
    case = small("channel", "tied", tokens=64 * 4, heads=2, value_heads=4, key_size=3)
    case.tensors["log_decay"][:, 3::50, ::2] = -1e4
    case.tensors["log_decay"][:, 64:128] = -0.1
    check_roughly(case)


@triton.jit
def next_below_kernel(x, found, count, PER: tl.constexpr, C: tl.constexpr):
    i_x = channel_decay.next_below(x, 0.5, tl.program_id(0), count, PER, C)
    while i_x < count:
        tl.store(found + i_x, tl.load(found + i_x) + 1)
        i_x = channel_decay.next_below(x, 0.5, i_x + tl.num_programs(0), count, PER, C)


# One row of numbers at a time, a few, and as many as there may be.
@pytest.mark.parametrize(("per", "channels"), [(1, 5000), (2, 300), (4, 5)])
def test_each_row_below_the_bar_is_found_once(per: int, channels: int) -> None:
    rows = 150
    x = 0.5 + torch.rand(rows, channels)
    low = torch.rand(rows) < 0.1
    x[low, torch.randint(channels, (int(low.sum()),))] = 0.4
    x[3, 0] = math.nan
    found = torch.zeros(rows * per, dtype=torch.int32)
    next_below_kernel[(3,)](x, found, rows * per, per, channels)
    expected = (x < 0.5).any(1)
    assert expected.any()
    assert torch.equal(found, expected.int().repeat_interleave(per))


@overflows
@pytest.mark.parametrize(("erase", "look", "programs"), [("tied", 2, 2), ("none", 4, 1)])
def test_more_flagged_chunks_than_programs(
    monkeypatch: pytest.MonkeyPatch, in_float32: None, erase: str, look: int, programs: int
) -> None:
    monkeypatch.setattr(channel_decay, "LOOK", look)
    monkeypatch.setattr(channel_stages, "PROGRAMS", programs)
    case = small("channel", erase, tokens=64 * 7, value_heads=2, key_size=3, value_size=3)
    decay = case.tensors["log_decay"]
    decay *= 0.01
    # Flagged by four blocks together, in one value head alone, and by one block.
    decay[:, :128, :, ::2] = -2.5 * math.log(2)
    decay[:, 256:320, 1, 1] = -2.5 * math.log(2)
    decay[:, 330::64, 0] = -1e4
    check_roughly(case)


@overflows
def test_fast_chunks_with_the_shift_that_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_stages, "has_fast_form", lambda inputs: True)
    case = small("channel", "tied", tokens=100, normalize_qk=True)
    case.tensors["log_decay"][:, 1:8, ::2] = -155 * math.log(2) / 7
    case.tensors["log_decay"][:, 8:64] *= 0.01
    # As small as gradients of a mean over many tokens.
    check_roughly(case, 1e-9)


def test_decays_between_weak_and_reset() -> None:
    for erase in ("tied", "free"):
        case = small("channel", erase)
        strong = torch.rand_like(case.tensors["log_decay"]) < 0.2
        case.tensors["log_decay"][strong] *= 50.0
        check(case)


@overflows
@pytest.mark.parametrize("change", [-0.3, -3.0, -30.0, -1e6])
@pytest.mark.parametrize("erase", ["none", "tied"])
def test_nothing_of_fast_rows_comes_from_the_future(
    in_float32: None, erase: str, change: float
) -> None:
    test_nothing_comes_from_the_future(erase, 2, change)


@pytest.mark.parametrize(("erase", "n_steps"), [("none", 1), ("tied", 2), ("free", 1)])
@pytest.mark.parametrize("change", [-0.3, -30.0, -1e6])
def test_nothing_comes_from_the_future(erase: str, n_steps: int, change: float) -> None:
    case = small("channel", erase, n_steps=n_steps, tokens=60)
    before, _, _ = passes.forward(call_inputs(case), False)
    for t in (37, 40, 48):
        later = {}
        for name in set(case.present()) - {"initial_state"}:
            x = case.tensors[name].clone()
            start = t * n_steps if name in ("k", "v", "beta") else t
            x[:, start:] = change if name == "log_decay" else x[:, start:] * 1.5
            later[name] = x
        after, _, _ = passes.forward(call_inputs(case.changed(**later)), False)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t:], after[:, t:])


def test_any_strides_of_the_decay() -> None:
    case = small("channel", "tied")
    turned = case.tensors["log_decay"].transpose(1, 3).contiguous().transpose(1, 3)
    check(case.changed(log_decay=turned))


@pytest.mark.parametrize("erase", ["none", "tied", "free"])
def test_float16_within_the_yardstick(erase: str) -> None:
    case = make_case(
        "channel", erase, batch=1, tokens=130, key_size=16, value_size=16, beta_max=1.0
    )
    case = case.to(torch.float16)
    d_o, d_state = weights(case)
    d_o, d_state = d_o.half(), d_state.float()
    exact, got = expected(case, d_o, d_state), run(case, d_o, d_state)
    names = case.present()
    leaves = [case.tensors[name].detach().clone().requires_grad_() for name in names]
    changed = case.changed(**dict(zip(names, leaves, strict=True)))
    out = run_module(chunked, changed, chunk_size=64, matmul_dtype=torch.float16)
    loss = (out.o * d_o).sum() + (out.final_state * d_state).sum()
    own = {"o": out.o.detach(), "final_state": out.final_state.detach()}
    for name, x in zip(names, torch.autograd.grad(loss, leaves), strict=True):
        own[f"d{name}"] = x
    for name, x in got.items():
        assert_close_to_yardstick(
            x, exact[name], own[name], dtype=torch.float16, gradient=name.startswith("d"), name=name
        )
