"""The scans of heads with 256 keys in Gluon, run on the CPU role by role, beside Triton's."""

from typing import Any

import pytest
import torch

from promised import promised

promised("triton")

from deltarule.ops.delta_rule.gluon import gradient_stage, wide_scan_stage
from deltarule.ops.delta_rule.triton import windows
from deltarule.ops.delta_rule.triton.plan import Call, new_plan
from gluon_interpreter import interpret_launches
from kernels.interpreted import inputs_of, interpreted
from ops.test_gluon_gradients import compare_passes
from oracle import Case, make_case


@pytest.fixture(autouse=True)
def launches(monkeypatch) -> list[int]:
    """Launches go through the interpreter, each in another order of events."""
    seeds: list[int] = []
    interpret_launches(monkeypatch, lambda: seeds.append(len(seeds)) or len(seeds))
    return seeds


def case_of(decay: str, erase: str, **options: Any) -> Case:
    sizes = {"batch": 1, "heads": 1, "value_heads": 1, "beta_max": 1.0, "tokens": 192}
    sizes |= {"key_size": 256, "value_size": 256, "dtype": torch.bfloat16}
    return make_case(decay, erase, **(sizes | options))


RAGGED, PACKED = {"tokens": 150, "batch": 2}, {"lengths": (3, 0, 70, 64)}


@interpreted
@pytest.mark.parametrize(
    ("decay", "erase", "options"),
    [
        ("head", "tied", {}), ("head", "tied", RAGGED | {"normalize_qk": True}),
        ("head", "tied", PACKED | {"value_size": 384}), ("head", "tied", {"value_heads": 2}),
        ("none", "tied", RAGGED), ("none", "tied", PACKED | {"normalize_qk": True}),
        ("head", "none", RAGGED | {"value_heads": 2}), ("head", "none", {"value_size": 128}),
        ("none", "none", RAGGED), ("none", "none", PACKED | {"normalize_qk": True}),
    ],
)  # fmt: skip
def test_both_passes_are_those_of_triton(decay, erase, options, launches, monkeypatch) -> None:
    monkeypatch.setattr(gradient_stage, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(gradient_stage, "halves_of", lambda inputs: 2)
    case = case_of(decay, erase, **options)
    compare_passes(case, lambda: take(monkeypatch), orders=2, alone=True)
    assert len(launches) == 14


def take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_scan_stage, "takes", lambda call: True)
    monkeypatch.setattr(gradient_stage, "runs", lambda call: True)


@interpreted
@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_computed_again_takes_the_kernels_of_windows(parts, launches, monkeypatch) -> None:
    cut_into = windows.cut_into
    monkeypatch.setattr(windows, "windows_of", lambda call: cut_into(call, parts))
    case = case_of("head", "tied", tokens=128, normalize_qk=True)
    compare_passes(case, lambda: take(monkeypatch), save=False)
    assert len(launches) == 1 + parts, "the forward, and the gradients alone"


@pytest.mark.parametrize(
    ("rule", "options", "halves"),
    [(("head", "tied"), {}, 1), (("head", "tied"), {"normalize_qk": True}, 2),
     (("head", "tied"), {"value_heads": 2}, 2), (("none", "tied"), {}, 2),
     (("head", "none"), {}, 2), (("head", "none"), {"value_size": 512}, 1),
     (("none", "tied"), {"key_size": 128}, 1)],
)  # fmt: skip
def test_gradients_take_halves_of_the_keys_where_those_are_faster(rule, options, halves) -> None:
    assert gradient_stage.halves_of(inputs_of(case_of(*rule, **options))) == halves


def test_they_are_for_256_keys_in_bfloat16() -> None:
    inputs = inputs_of(case_of("head", "tied"))
    assert wide_scan_stage.can(inputs)
    assert not wide_scan_stage.takes(Call(inputs, new_plan(inputs))), "on a CPU"
    assert not wide_scan_stage.can(inputs._replace(batch_invariant=True))
    for other in ({"dtype": torch.float16}, {"key_size": 128}, {"value_size": 192}):
        assert not wide_scan_stage.can(inputs_of(case_of("head", "tied", **other)))
    for rule in (("channel", "tied"), ("head", "free")):
        assert not wide_scan_stage.can(inputs_of(case_of(*rule)))
