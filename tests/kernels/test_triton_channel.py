"""Fast and flagged chunks of a decay per channel, under the interpreter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.interpreted import interpreted, on_the_cpu
from kernels.test_triton_kernels import check_causal, small
from oracle import Case, check, compared
from promised import promised
from tolerance import relative_rms

promised("triton")

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton import channel_flagged, channel_stages

__all__ = ["on_the_cpu"]
pytestmark = [interpreted, pytest.mark.usefixtures("on_the_cpu")]


def check_roughly(case: Case, size: float = 1.0, save: bool = True, roundings: int = 8) -> None:
    """As `check`; a sum of logarithms over 2^7 loses 2^-17 a rounding, and meets another one."""
    found = compared(case, "triton", size=size, save_states=save)
    bar = 2**-17 * (2 * roundings) ** 0.5
    for name, (x, exact, _) in found.items():
        assert relative_rms(x, exact) < bar, name


class Unlaunched:
    """A kernel that does nothing."""

    arg_names, fn = ("q",), staticmethod(lambda q: None)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for bfloat16 take float32, which has room for less."""
    monkeypatch.setattr(channel_stages, "has_fast_form", lambda inputs: inputs.decay == "channel")
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
    ("free", {"tokens": 130, "heads": 2, "value_heads": 4, "value_size": 70}),
    ("free", {"lengths": (3, 0, 70), "value_heads": 2, "key_size": 40}),
]


@pytest.mark.parametrize(("erase", "sizes"), FAST)
def test_fast_chunks(
    monkeypatch: pytest.MonkeyPatch, in_float32: None, erase: str, sizes: dict[str, Any]
) -> None:
    monkeypatch.setattr(channel_stages, "exact_scores_kernel", Unlaunched())
    monkeypatch.setattr(channel_stages, "exact_gradients_kernel", Unlaunched())
    case = small("channel", erase, **sizes)
    # -95 as a power of 2 over a part of the first chunk, of at most -100.
    case.tensors["log_decay"] *= 0.01
    case.tensors["log_decay"][:, 1:8, ::2] = -95 * math.log(2) / 7
    check_roughly(case)


@overflows
@pytest.mark.parametrize(("of", "save"), [(0, True), (1, False), (4, False), (6, True), (7, False)])
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
@pytest.mark.parametrize(("erase", "n_steps"), [("tied", 2), ("free", 1)])
@pytest.mark.parametrize(
    ("spacing", "strength"), [(1, -1e4), (2, -torch.inf), (7, -1e6), (40, -1e4), (16, -torch.inf)]
)
def test_resets_of_flagged_chunks(
    in_float32: None, spacing: int, strength: float, erase: str, n_steps: int
) -> None:
    # The second chunk has no reset.
    case = small("channel", erase, n_steps=n_steps, tokens=70, value_heads=2)
    case.tensors["log_decay"][:, : 64 // n_steps : spacing, ::2] = strength
    check_roughly(case)


@triton.jit
def next_below_kernel(x, found, count, PER: tl.constexpr, C: tl.constexpr):
    i_x = channel_flagged.next_below(x, 0.5, tl.program_id(0), count, PER, C)
    while i_x < count:
        tl.store(found + i_x, tl.load(found + i_x) + 1)
        i_x = channel_flagged.next_below(x, 0.5, i_x + tl.num_programs(0), count, PER, C)


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
@pytest.mark.parametrize(
    ("erase", "look", "programs"), [("tied", 2, 2), ("none", 4, 1), ("free", 2, 2)]
)
def test_more_flagged_chunks_than_programs(
    monkeypatch: pytest.MonkeyPatch, in_float32: None, erase: str, look: int, programs: int
) -> None:
    monkeypatch.setattr(channel_flagged, "LOOK", look)
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
@pytest.mark.parametrize("erase", ["tied", "free"])
def test_fast_chunks_with_the_shift_that_is_shipped(
    monkeypatch: pytest.MonkeyPatch, erase: str
) -> None:
    monkeypatch.setattr(channel_stages, "has_fast_form", lambda inputs: True)
    case = small("channel", erase, tokens=100, normalize_qk=erase == "tied")
    case.tensors["log_decay"][:, 1:8, ::2] = -155 * math.log(2) / 7
    case.tensors["log_decay"][:, 8:64] *= 0.01
    # As small as gradients of a mean over many tokens; after token 8 all sums are over 2^7.
    check_roughly(case, 1e-9, roundings=56)


def test_decays_between_weak_and_reset() -> None:
    for erase in ("tied", "free"):
        case = small("channel", erase)
        strong = torch.rand_like(case.tensors["log_decay"]) < 0.2
        case.tensors["log_decay"][strong] *= 50.0
        check(case, "triton")


@overflows
@pytest.mark.parametrize(("erase", "n_steps"), [("none", 1), ("tied", 2), ("free", 1)])
def test_nothing_of_fast_rows_comes_from_the_future(in_float32, erase, n_steps) -> None:
    check_causal(small("channel", erase, n_steps=n_steps, tokens=60))
