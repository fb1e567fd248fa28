"""The scan back and the gradients as one kernel in Gluon, run on the CPU role by role."""

from typing import Any

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from deltarule.ops.delta_rule.gluon import gradient_stage, stage
from deltarule.ops.delta_rule.triton import passes, plan
from deltarule.ops.delta_rule.triton.passes import new_gradients
from deltarule.ops.delta_rule.triton.plan import Call, new_plan
from gluon_interpreter import interpret_launches
from kernels.interpreted import interpreted as interpreted_by_triton
from ops import test_gluon_gradients as parts
from oracle import Case, check_fused_gradients, weights
from tolerance import relative_rms

SEED = 0
LOW = ("states", "errors", "scores", "corrections")
GIVEN = ("q", "k", "v", "beta", "log_decay", "initial")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Launches go through the interpreter."""
    interpret_launches(monkeypatch, lambda: SEED)


def case_of(decay: str, erase: str, **options: Any) -> Case:
    sizes = {"heads": 2, "value_heads": 2, "key_size": 128, "value_size": 128, "tokens": 192}
    return parts.case_of(decay, erase, **(sizes | options))


def call_of(case: Case) -> Call:
    inputs = parts.inputs_of(case)
    return Call(inputs, new_plan(inputs))


def ends_of_segments(d_states: Tensor, sequences: int, size: int) -> Tensor:
    """D at the ends of segments of so many chunks, of D at the ends of all chunks."""
    each = d_states.unflatten(0, (sequences, -1))
    last = [min(end, each.shape[1]) - 1 for end in range(size, each.shape[1] + size, size)]
    return each[:, last].flatten(0, 1)


def run(case: Case, given: tuple[Tensor, Tensor], scores: bool = True) -> dict[str, Tensor]:
    """The gradients that the kernel leaves, from what a forward saves, of float64."""
    call = call_of(case)
    own = parts.around_all(case, given, call.plan.chunks)
    for name in (*LOW, "scalings", "chunk_decay"):
        x, dtype = own.get(name), torch.bfloat16 if name in LOW else torch.float32
        call.values[name] = None if x is None else x.detach().to(dtype).contiguous()
    if not scores:
        call.values["scores"] = None
    if case.tensors["beta"] is None:
        call.values["corrections"] = None
    call.values["d_o"] = given[0].bfloat16()
    new_gradients(call)
    found = {name: x for name in GIVEN if (x := call["d_" + name]) is not None}
    for x in found.values():
        x.fill_(torch.nan)
    d_end = given[1]
    if size := call.plan.per_segment:
        d_end = ends_of_segments(own["d_states"], len(d_end), size)
    assert gradient_stage.can_whole(call.inputs, cut=call.plan.per_segment > 0)
    gradient_stage.backward(call, d_end.detach().float().contiguous())
    return found


def check(case: Case, scores: bool = True) -> None:
    given = weights(case)
    given = given[0].bfloat16(), given[1]
    found = run(case, given, scores)
    check_fused_gradients(found | {"initial_state": found.pop("initial")}, case, given)


# Decay, erase, and whether P is saved.
FORMS = [
    ("none", "none", False), ("none", "tied", False), ("none", "tied", True),
    ("head", "none", True), ("head", "tied", True),
]  # fmt: skip


@pytest.mark.parametrize(("decay", "erase", "scores"), FORMS)
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_those_of_the_definition(decay, erase, scores, normalize) -> None:
    check(case_of(decay, erase, normalize_qk=normalize), scores)


@pytest.mark.parametrize(("decay", "erase", "scores"), FORMS)
@pytest.mark.parametrize("sizes", [{"tokens": 150, "batch": 2}, {"lengths": (3, 0, 70, 64, 1)}])
def test_so_they_are_of_chunks_that_are_not_whole(decay, erase, scores, sizes) -> None:
    check(case_of(decay, erase, **sizes), scores)


@pytest.mark.parametrize("erase", ["none", "tied"])
@pytest.mark.parametrize(("key_size", "value_size"), parts.SIZES)
@pytest.mark.parametrize("ends", parts.ENDS)
def test_heads_that_do_not_fill_tiles(key_size, value_size, ends, erase, monkeypatch) -> None:
    case = case_of("head", erase, key_size=key_size, value_size=value_size, **ends)
    parts.compare_with_zeros(run, case, monkeypatch)


def test_so_they_are_of_states_of_96_by_96() -> None:
    check(case_of("head", "tied", heads=4, value_heads=4, key_size=96, value_size=96))


@pytest.mark.parametrize("erase", ["none", "tied"])
def test_so_they_are_of_segments(erase, monkeypatch) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: 2)
    check(case_of("head", erase, batch=2, tokens=300))


def test_so_they_are_where_they_are_reset() -> None:
    case = case_of("head", "tied", tokens=100)
    decay = case.tensors["log_decay"] * 0.05
    where = torch.rand_like(decay) < 0.1
    where[:, 64:67] = True
    check(case.changed(log_decay=decay.masked_fill(where, -200.0)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_the_order_of_events_the_bits_are_the_same(seed, monkeypatch) -> None:
    case = case_of("head", "tied", tokens=300)
    given = weights(case)
    expected = run(case, given)
    monkeypatch.setitem(globals(), "SEED", seed)
    for name, x in run(case, given).items():
        assert torch.equal(x, expected[name]), name


@interpreted_by_triton
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize(("decay", "erase"), [("head", "none"), ("head", "tied"), ("none", "tied")])
def test_a_whole_backward_takes_what_the_forward_saved(decay, erase, segment, monkeypatch) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: segment)
    # Triton's interpreter has no arithmetic in bfloat16.
    case = case_of(decay, erase, batch=2, tokens=256).to(torch.float16)
    inputs, (d_o, d_final) = parts.inputs_of(case), weights(case)
    given = d_o.half(), d_final.float(), inputs, passes.forward(inputs, True)[2]
    expected, taken = passes.backward(*given), []
    monkeypatch.setattr(gradient_stage, "takes_whole", lambda call: taken.append(call) or True)
    for x, y in zip(passes.backward(*given), expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or relative_rms(x, y.double()) < 2e-3
    assert taken


@pytest.mark.parametrize(("decay", "erase"), [("head", "none"), ("head", "tied"), ("none", "tied")])
def test_gradients_may_take_the_place_of_what_was_saved(decay, erase, monkeypatch) -> None:
    for name in ("pays", "taken_in_parts"):
        found = {"pays": True, "taken_in_parts": None}[name]
        monkeypatch.setattr(stage, name, lambda x, *_, found=found: found or x)
    monkeypatch.setattr(gradient_stage, "takes_whole", lambda call: True)
    case = case_of(decay, erase, batch=2, normalize_qk=True)
    inputs, (d_o, d_final) = parts.inputs_of(case), weights(case)
    given = d_o.bfloat16(), d_final.float()

    def gradients(kept: Tensor, spent: bool) -> list[Tensor]:
        found = passes.gradient_stages.run(inputs, *given, kept, spent)
        return [x for x in found if x is not None]

    kept = passes.forward(inputs, True)[2]
    repeated = [gradients(kept, spent=False) for _ in range(2)]
    inside = gradients(kept, spent=True)
    places = [x.data_ptr() - kept.data_ptr() for x in inside]
    count = sum(0 <= place < kept.nbytes for place in places)
    assert count == (2 if erase == "none" else 3)
    # Tensors of their own: what is done to one in place is not done to the others.
    version = inside[0]._version
    inside[1].add_(0)
    assert (inside[0]._version, inside[0]._is_view()) == (version, False)
    monkeypatch.setattr(gradient_stage, "lends", lambda call: False)
    expected = gradients(passes.forward(inputs, True)[2], spent=True)
    for found in (*repeated, inside):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# By sequences of 4,096 tokens and heads, on 132 multiprocessors.
@pytest.mark.parametrize(
    ("decay", "erase", "batch", "options", "takes"),
    [
        ("head", "tied", 8, {}, True),
        ("head", "tied", 6, {}, False),
        ("head", "tied", 6, {"value_heads": 32}, False),
        ("none", "tied", 7, {}, True),
        ("head", "none", 5, {}, True),
        ("head", "none", 9, {}, False),
        ("head", "tied", 8, {"normalize_qk": True}, True),
        ("head", "tied", 7, {"normalize_qk": True}, False),
        ("head", "tied", 1, {"lengths": (256,) * 16}, False),
        ("head", "tied", 1, {"lengths": (64,) * 64}, True),
    ],
)
def test_it_is_taken_where_its_programs_fill_the_gpu(
    decay, erase, batch, options, takes, monkeypatch
) -> None:
    monkeypatch.setattr(gradient_stage, "runs", lambda call: True)
    monkeypatch.setattr(gradient_stage, "multiprocessors", lambda device: 132)
    sizes = {"heads": 16, "value_heads": 16, "batch": batch, "tokens": 64}
    assert gradient_stage.takes_whole(call_of(case_of(decay, erase, **(sizes | options)))) == takes
