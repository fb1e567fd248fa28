"""Calls of few programs on an H100 or H200: scans in Gluon have the bits of Triton's."""

import pytest
import torch
from torch import Tensor

import truth
from deltarule.ops.delta_rule.gluon import segment_scan_stage
from deltarule.ops.dispatch import forget_calls
from oracle import Case, check, check_fused
from truth import DEVICE, Kind, assert_same, draw, results

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

TAKES = segment_scan_stage.takes


def case_of(value_heads: int, **options: object) -> Case:
    """Sequences in segments, or with many heads in narrow tiles."""
    sizes = {"batch": 1, "heads": 2, "value_heads": value_heads, "tokens": 1024}
    sizes |= {"key_size": 128, "value_size": 128} | options
    case = Kind("head", "tied", 1, torch.bfloat16).case(**sizes)
    return case.changed(log_decay=case.tensors["log_decay"] * 0.1)


@pytest.fixture
def taken(monkeypatch) -> set[str]:
    """What has been launched, of the four."""
    found: set[str] = set()

    def takes(call: object, goal: str) -> bool:
        found.update({goal} if (able := TAKES(call, goal)) else ())
        return able

    monkeypatch.setattr(segment_scan_stage, "takes", takes)
    # For few programs, too.
    monkeypatch.setattr(segment_scan_stage, "fills", lambda *_: True)
    forget_calls()
    return found


def alone(case: Case) -> dict[str, Tensor]:
    with torch.no_grad():
        out = truth.call(case, case.tensors)
    return {"o": out.o, "final_state": out.final_state}


@pytest.mark.parametrize("value_heads", [2, 4, 48])
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_scans_have_the_bits_of_tritons(value_heads, tokens, monkeypatch, taken) -> None:
    """But for starts from halves, which round otherwise."""
    monkeypatch.setattr(segment_scan_stage, "halved", lambda call: None)
    drawn = draw(case_of(value_heads, tokens=tokens))
    found = results(drawn), alone(drawn.case)
    assert "outputs" in taken
    assert tokens == 1024 or value_heads == 48 or "ends" in taken
    scores_and_ends = lambda x, goal: goal != "outputs" and TAKES(x, goal)  # noqa: E731
    monkeypatch.setattr(segment_scan_stage, "takes", scores_and_ends)
    forget_calls()
    assert_same(found[1], alone(drawn.case))
    assert_same({name: found[0][name] for name in found[1]}, found[1])


@pytest.mark.parametrize("value_heads", [2, 4])
def test_all_of_them_are_as_exact_as_the_yardstick(value_heads, taken) -> None:
    case = case_of(value_heads, tokens=2048)
    decay = case.tensors["log_decay"].clone()
    decay[:, 700:703], decay[:, 1500, 1] = -torch.inf, -1e4
    check(case.changed(log_decay=decay), "triton", device=DEVICE)
    assert taken >= {"scores", "ends", "back"}


@pytest.mark.parametrize("value_heads", [16, 32])
def test_a_forward_alone_has_segments_of_its_own(value_heads, monkeypatch) -> None:
    ran, run = [], segment_scan_stage.run
    monkeypatch.setattr(
        segment_scan_stage, "run", lambda *of: (ran.append((of[1], *of[5:])), run(*of))
    )
    forget_calls()
    case = case_of(value_heads, tokens=4096)
    decay = case.tensors["log_decay"].clone()
    decay[:, 1400:1403], decay[:, 3000, 1] = -torch.inf, -1e4
    drawn = draw(case := case.changed(log_decay=decay))
    found = alone(drawn.case)
    assert ran[-3:] == [("ends", "later"), ("outputs", "first"), ("outputs", "later")]
    # The second call is recorded, and the third repeats its launches.
    assert_same(found, alone(drawn.case))
    assert_same(found, alone(drawn.case))
    check_fused((found["o"], found["final_state"]), case)
