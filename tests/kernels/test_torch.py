"""ops/delta_rule/torch against the float64 oracle: values, gradients, precision, resets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarule import pack
from deltarule.ops.delta_rule.torch import passes as torch_passes
from deltarule.ops.packed_chunks import packed_groups
from oracle import (
    DECAYS,
    ERASES,
    Case,
    cases,
    check,
    compared,
    make_case,
    weights,
    with_gradients,
)
from tolerance import assert_close_to_yardstick

GRID = [(decay, erase) for decay in DECAYS for erase in ERASES]


@settings(max_examples=60)
@given(cases())
def test_any_shape_in_float64(drawn: tuple[Case, int]) -> None:
    check(drawn[0], "torch")


@pytest.mark.parametrize(("decay", "erase"), GRID)
def test_float32(decay: str, erase: str) -> None:
    check(make_case(decay, erase, tokens=200, key_size=16).to(torch.float32), "torch")


@pytest.mark.parametrize("spacing", [1, 2, 7, 40])
@pytest.mark.parametrize("strength", [-1e4, -1e6, -torch.inf])
@pytest.mark.parametrize(
    ("decay", "erase"),
    [("head", "none"), ("head", "tied"), ("channel", "tied"), ("channel", "free")],
)
def test_resets(decay: str, erase: str, strength: float, spacing: int) -> None:
    case = make_case(decay, erase, tokens=150, n_steps=1 if erase == "free" else 2)
    log_decay = case.tensors["log_decay"]
    log_decay[0, ::spacing] = strength
    log_decay[1, 3::spacing, 0] = strength
    check(case.to(torch.float32), "torch")


# exp(-87) is the smallest normal float32: below it, what little is left has fewer digits.
@pytest.mark.parametrize("strength", [-5.0, -20.0, -59.0, -61.0, -86.0])
def test_strong_decays_cost_their_neighbours_nothing(strength: float) -> None:
    case = make_case("channel", "tied", tokens=150)
    case.tensors["log_decay"][:, ::5] = strength
    check(case.to(torch.float32), "torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "erase"), GRID)
def test_half_precision_within_the_yardstick(decay: str, erase: str, dtype: torch.dtype) -> None:
    sizes = {"key_size": 16, "value_size": 16, "beta_max": 1.0}
    case = make_case(decay, erase, tokens=130, **sizes).to(dtype)
    for name, (found, exact, own) in compared(case, "torch").items():
        # The sum over tokens that a constant decay has as its gradient mostly cancels.
        if name != "d log_decay" or decay != "constant":
            bars = {"dtype": dtype, "gradient": name.startswith("d "), "name": name}
            assert_close_to_yardstick(found, exact, own, **bars)


def test_keys_and_strengths_at_their_ends() -> None:
    unwritten, identical = make_case(tokens=30), make_case("none", tokens=130)
    unwritten.tensors["beta"][:, ::2] = 0.0
    without_direction = make_case(tokens=20, normalize_qk=True)
    x = without_direction.tensors
    x["k"][:, 5] = x["q"][:, 7] = 0.0
    for case in (unwritten, without_direction):
        check(case.to(torch.float32), "torch")
    # Keys that are erased as strongly as there is.
    identical.tensors["k"][:] = identical.tensors["k"][:, :1]
    identical.tensors["beta"][:] = 2.0
    check(identical.to(torch.float32), "torch", stress=True)


@pytest.mark.parametrize("elements", [1, 4096, 2**30])
@pytest.mark.parametrize("lengths", [None, (90, 0, 3, 70)])
@pytest.mark.parametrize(("decay", "erase"), [("channel", "tied"), ("head", "none")])
def test_any_number_of_chunks_at_once(decay, erase, lengths, elements, monkeypatch) -> None:
    monkeypatch.setattr(torch_passes, "window_elements", lambda device: elements)
    case = make_case(decay, erase, batch=3, tokens=150, lengths=lengths)
    check(case, "torch")


@given(st.lists(st.integers(0, 90), max_size=8), st.integers(1, 9))
def test_plans_place_every_token_once(lengths: list[int], window: int) -> None:
    tokens = sum(lengths)
    groups = packed_groups(pack(lengths), tokens, 16, window, torch.device("cpu"))
    placed, chunks = [], []
    for _, windows in groups:
        for part in windows:
            chunks += part.chunks.tolist()
            at, _, full = part.packed
            placed += at.tolist() if full is None else at[full].tolist()
    assert sorted(placed) == list(range(tokens))
    assert sorted(chunks) == list(range(sum(-(-length // 16) for length in lengths)))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("erase", ["none", "tied"])
def test_windows_change_no_bit(erase, decay, heads, monkeypatch) -> None:
    case = make_case(decay, erase, lengths=(90, 3, 70, 200), heads=heads, value_heads=2)
    case = case.to(torch.float32)
    d_o, d_state = weights(case)
    out, expected = with_gradients(case, "torch", d_o, d_state)
    # Forward and backward may even differ, as they do when threads are added in between.
    sizes = iter([1, 2**30])
    monkeypatch.setattr(torch_passes, "window_elements", lambda device: next(sizes))
    other, gradients = with_gradients(case, "torch", d_o, d_state)
    assert torch.equal(out.o, other.o)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
