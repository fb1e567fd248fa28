"""The chunked algorithm equals the definition, for every shape, decay and erase."""

import pytest
import torch
from hypothesis import given, settings

from deltarule.doctor import chunked
from deltarule.ops.delta_rule import definition
from oracle import ERASES, Case, cases, make_case, run_module
from tolerance import relative_rms


@settings(max_examples=120)
@given(cases())
def test_chunked_equals_recurrent(drawn: tuple[Case, int]) -> None:
    case, chunk_size = drawn
    expected, got = run_module(definition, case), run_module(chunked, case, chunk_size=chunk_size)
    assert relative_rms(got.o, expected.o) <= 1e-12
    assert relative_rms(got.final_state, expected.final_state) <= 1e-12


@pytest.mark.parametrize("erase", ERASES)
def test_resets(erase: str) -> None:
    case = make_case("channel", erase, tokens=50)
    log_decay = case.tensors["log_decay"]
    log_decay[0, ::3], log_decay[1, 5], log_decay[:, 20:30, :, ::2] = -1e4, -torch.inf, -1e6
    expected, got = run_module(definition, case), run_module(chunked, case)
    assert relative_rms(got.o, expected.o) <= 1e-12
    assert relative_rms(got.final_state, expected.final_state) <= 1e-12


def test_yardstick_rounds_its_operands() -> None:
    case = make_case("head", "tied", dtype=torch.float32)
    exact = run_module(definition, case.to(torch.float64))
    rounded = run_module(chunked, case, matmul_dtype=torch.bfloat16)
    assert 1e-4 < relative_rms(rounded.o, exact.o) < 2e-2


def test_reference_has_second_derivatives() -> None:
    case = make_case(
        "channel", "tied", batch=1, tokens=3, heads=1, value_heads=1, key_size=2, value_size=2
    )
    names = case.present()
    leaves = [case.tensors[name].requires_grad_() for name in names]
    assert torch.autograd.gradgradcheck(
        lambda *x: run_module(definition, case.changed(**dict(zip(names, x, strict=True)))), leaves
    )
