"""The gradients of chunks with a decay per channel in Gluon, run on the CPU role by role."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from promised import promised

promised("triton")

from deltarule.ops.delta_rule.gluon import channel_gradients, gradient_stage
from deltarule.ops.delta_rule.triton import channel_stages, passes
from deltarule.ops.delta_rule.triton.passes import new_gradients
from deltarule.ops.delta_rule.triton.plan import Call, new_plan
from gluon_interpreter import interpret_launches
from kernels.interpreted import interpreted as interpreted_by_triton
from ops import test_gluon_gradients as parts
from oracle import Case, check_fused_gradients, weights
from tolerance import relative_rms

PROGRAMS, SEED = 3, 0
LOW = ("states", "errors", "d_states", "d_errors")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Launches go through the interpreter, on a GPU of a few multiprocessors."""
    interpret_launches(monkeypatch, lambda: SEED)
    monkeypatch.setattr(gradient_stage, "multiprocessors", lambda device: PROGRAMS)


def case_of(erase: str, **options: Any) -> Case:
    sizes = {"heads": 4, "value_heads": 4, "key_size": 128, "value_size": 128, "tokens": 192}
    return parts.case_of("channel", erase, **(sizes | options))


def run(case: Case, given: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The gradients that the kernel leaves, from what the other kernels leave, of float64."""
    inputs = parts.inputs_of(case)
    call = Call(inputs, new_plan(inputs))
    for name, x in parts.around_all(case, given, call.plan.chunks).items():
        dtype = torch.bfloat16 if name in LOW else torch.float32
        call.values[name] = None if x is None else x.detach().to(dtype).contiguous()
    call.values["d_o"] = given[0].bfloat16()
    new_gradients(call)
    names = [name for name in ("q", "k", "beta", "log_decay") if call["d_" + name] is not None]
    for name in names:
        call["d_" + name].fill_(torch.nan)
    assert gradient_stage.can_by_channel(call.inputs)
    gradient_stage.channel_gradients(call)
    return {name: call["d_" + name] for name in names}


def check(case: Case) -> None:
    given = weights(case)
    given = given[0].bfloat16(), given[1]
    # Another kernel goes through the norms.
    check_fused_gradients(run(case, given), case, given, constant_norms=True)


@pytest.mark.parametrize("erase", ["none", "tied"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_those_of_the_definition(erase, normalize) -> None:
    # Errors of few heads spread.
    check(case_of(erase, normalize_qk=normalize, heads=8, value_heads=8, tokens=128))


@pytest.mark.parametrize("erase", ["none", "tied"])
@pytest.mark.parametrize("sizes", [{"tokens": 150, "batch": 2}, {"lengths": (3, 0, 70, 64, 1)}])
def test_so_they_are_of_chunks_that_are_not_whole(erase, sizes) -> None:
    check(case_of(erase, **sizes))


def test_so_they_are_of_decays_down_to_the_end_of_the_range() -> None:
    case = case_of("tied")
    # 64 of these come to 2^-152.
    decay = torch.full_like(case.tensors["log_decay"], -1.65)
    half = torch.arange(128) % 2 == 0
    check(case.changed(log_decay=torch.where(half, decay, case.tensors["log_decay"])))


@pytest.mark.parametrize("tokens", [300, 256])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_the_order_of_events_the_bits_are_the_same(seed, tokens, monkeypatch) -> None:
    case = case_of("tied", tokens=tokens)
    given = weights(case)
    expected = run(case, given)
    monkeypatch.setitem(globals(), "SEED", seed)
    for name, x in run(case, given).items():
        assert torch.equal(x, expected[name]), name


@interpreted_by_triton
@pytest.mark.parametrize("erase", ["none", "tied"])
@pytest.mark.parametrize("sizes", [{"tokens": 128, "normalize_qk": True}, {"lengths": (70, 60)}])
def test_a_whole_backward_takes_them_and_writes_flagged_chunks_again(
    erase, sizes, monkeypatch
) -> None:
    case = case_of(erase, heads=1, value_heads=1, **sizes).to(torch.float16)
    decay = case.tensors["log_decay"] * 0.05
    decay[:, 70:120] = -1.0
    inputs, (d_o, d_final) = parts.inputs_of(case.changed(log_decay=decay)), weights(case)
    given = d_o.half(), d_final.float(), inputs
    # The exact kernels: Triton's interpreter has no arithmetic in bfloat16.
    expected = passes.backward(*given, passes.forward(inputs, True)[2])
    monkeypatch.setattr(channel_stages, "has_fast_form", lambda inputs: True)
    # float16 has less room.
    monkeypatch.setattr(channel_stages, "SHIFT", 0.0)
    monkeypatch.setattr(channel_stages, "RANGE", 8.0)
    monkeypatch.setattr(channel_gradients, "SHIFT", gl.constexpr(0.0))
    monkeypatch.setattr(channel_gradients, "UNSHIFT", gl.constexpr(1.0))
    taken = lambda call: gradient_stage.channel_gradients  # noqa: E731
    monkeypatch.setattr(channel_stages, "fastest_gradients", taken)
    found = passes.backward(*given, passes.forward(inputs, True)[2])
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or relative_rms(x, y.double()) < 2e-3
