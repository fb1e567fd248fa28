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


def case_of(value_heads: int, decay: str = "head", **options: object) -> Case:
    """Sequences in segments, or with many heads in narrow tiles."""
    sizes = {"batch": 1, "heads": 2, "value_heads": value_heads, "tokens": 1024}
    sizes |= {"key_size": 128, "value_size": 128} | options
    case = Kind(decay, "tied", 1, torch.bfloat16).case(**sizes)
    decays = case.tensors["log_decay"]
    return case if decays is None else case.changed(log_decay=decays * 0.1)


def reset(case: Case, some: slice, of_a_head: int) -> Case:
    """A case that forgets everything at some tokens, and nearly so in one head at another."""
    if (decays := case.tensors["log_decay"]) is None:
        return case
    decays = decays.clone()
    decays[:, some], decays[:, of_a_head, 1] = -torch.inf, -1e4
    return case.changed(log_decay=decays)


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
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_scans_have_the_bits_of_tritons(decay, value_heads, tokens, monkeypatch, taken) -> None:
    """But for starts from halves, which round otherwise."""
    monkeypatch.setattr(segment_scan_stage, "halved", lambda call: None)
    drawn = draw(case_of(value_heads, decay, tokens=tokens))
    found = results(drawn), alone(drawn.case)
    assert "outputs" in taken
    assert tokens == 1024 or value_heads == 48 or "ends" in taken
    scores_and_ends = lambda x, goal: goal != "outputs" and TAKES(x, goal)  # noqa: E731
    monkeypatch.setattr(segment_scan_stage, "takes", scores_and_ends)
    forget_calls()
    assert_same(found[1], alone(drawn.case))
    assert_same({name: found[0][name] for name in found[1]}, found[1])


@pytest.mark.parametrize("value_heads", [2, 4])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_all_of_them_are_as_exact_as_the_yardstick(decay, value_heads, taken) -> None:
    case = reset(case_of(value_heads, decay, tokens=2048), slice(700, 703), 1500)
    check(case, "triton", device=DEVICE)
    assert taken >= {"ends", "back", *(["scores"] if decay == "head" else [])}


@pytest.mark.parametrize("value_heads", [16, 32])
@pytest.mark.parametrize("decay", ["head", "channel", "none"])
def test_a_forward_alone_has_segments_of_its_own(decay, value_heads, monkeypatch) -> None:
    ran, run = [], segment_scan_stage.run
    monkeypatch.setattr(
        segment_scan_stage, "run", lambda *of: (ran.append((of[1], *of[5:])), run(*of))
    )
    forget_calls()
    drawn = draw(case := reset(case_of(value_heads, decay, tokens=4096), slice(1400, 1403), 3000))
    found = alone(drawn.case)
    assert ran[-3:] == [("ends", "later"), ("outputs", "first"), ("outputs", "later")]
    # The second call is recorded, and the third repeats its launches.
    assert_same(found, alone(drawn.case))
    assert_same(found, alone(drawn.case))
    check_fused((found["o"], found["final_state"]), case)
