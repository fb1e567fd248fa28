"""The scans in Gluon, run on the CPU role by role: outputs, and what segments leave."""

from typing import Any

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from deltarule.ops.delta_rule.gluon import segment_scan_stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes, plan
from deltarule.ops.delta_rule.triton.passes import kept_shapes
from gluon_interpreter import interpret_launches
from kernels.interpreted import inputs_of
from kernels.interpreted import interpreted as interpreted_by_triton
from ops.test_gluon import saved_of
from ops.test_gluon_gradients import compare_passes
from oracle import Case, check_fused, make_case
from tolerance import relative_rms

CHUNK, SIZE = 64, 128


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    interpret_launches(monkeypatch, lambda: 0)


def case_of(decay: str = "head", **options: object) -> Case:
    """Decays so weak that what came before a segment still counts after it."""
    sizes = {"heads": 1, "value_heads": 2, "key_size": SIZE, "value_size": SIZE, "beta_max": 1.0}
    case = make_case(decay, "tied", **(sizes | options), dtype=torch.bfloat16)
    decays = case.tensors["log_decay"]
    return case if decays is None else case.changed(log_decay=0.05 * decays)


def call_of(case: Case) -> plan.Call:
    return plan.Call(inputs := inputs_of(case), plan.new_plan(inputs))


@interpreted_by_triton
@pytest.mark.parametrize(
    ("size", "options", "narrow"),
    [
        (2, {"tokens": 5 * CHUNK}, False), (2, {"tokens": 5 * CHUNK, "normalize_qk": True}, False),
        (1, {"batch": 1, "tokens": 6 * CHUNK}, False),
        # More chunks than slots.
        (6, {"batch": 1, "tokens": 11 * CHUNK, "value_heads": 1}, False),
        # Whole sequences; and tiles beside which a forward that saves nothing makes P.
        (0, {"tokens": 5 * CHUNK}, False), (0, {"tokens": 5 * CHUNK}, True),
        (2, {"tokens": 5 * CHUNK}, True), (2, {"tokens": 5 * CHUNK, "normalize_qk": True}, True),
    ],
)  # fmt: skip
def test_calls_in_segments_are_those_of_triton(size, options, narrow, monkeypatch) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: size)
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 132 if narrow else 1)
    case, taken = case_of(**options), set()
    assert call_of(case).plan.tile_key.narrow == narrow
    if not case.normalize_qk:
        decay = case.tensors["log_decay"]
        # The scores' kernel leaves sums of numbers.
        decay[:, 130], decay[:, 150, -1], decay[:, 256] = -200.0, -1e4, -200.0

    def takes(call: plan.Call, goal: str) -> bool:
        taken.add(goal)
        return not (goal == "scores" and call.inputs.normalize_qk)

    take = lambda: monkeypatch.setattr(segment_scan_stage, "takes", takes)  # noqa: E731
    compare_passes(case, take, alone=True)
    assert taken == {"scores", "outputs", *(("ends", "back") if size else ())}


@interpreted_by_triton
@pytest.mark.parametrize(
    ("size", "options", "narrow"),
    [
        (2, {"tokens": 5 * CHUNK, "batch": 1}, False),
        (2, {"tokens": 5 * CHUNK, "batch": 1, "normalize_qk": True}, True),
        # More chunks than slots.
        (4, {"batch": 1, "tokens": 8 * CHUNK, "value_heads": 1}, False),
        (0, {"tokens": 3 * CHUNK}, False), (0, {"tokens": 3 * CHUNK}, True),
    ],
)  # fmt: skip
def test_so_they_are_with_a_decay_per_channel(size, options, narrow, monkeypatch) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: size)
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: 132 if narrow else 1)
    case, taken = case_of("channel", **options), set()
    assert segment_scan_stage.parts(call_of(case), "outputs") == (1 if narrow else 2)
    decay = case.tensors["log_decay"]
    decay[:, 70, -1, 1:], decay[:, 130] = -1e4, -200.0

    def takes(call: plan.Call, goal: str) -> bool:
        able = segment_scan_stage.can(bfloat16_of(call.inputs), goal)
        taken.update({goal} if able else ())
        return able

    take = lambda: monkeypatch.setattr(segment_scan_stage, "takes", takes)  # noqa: E731
    compare_passes(case, take, alone=True)
    assert taken == {"outputs", *(("ends", "back") if size else ())}


def bfloat16_of(inputs: Inputs) -> Inputs:
    return inputs._replace(q=inputs.q.bfloat16())


@pytest.mark.parametrize("processors", [16, 15])
@pytest.mark.parametrize(("segments", "given"), [(7, True), (2, True), (3, False)])
def test_starts_follow_from_halves_of_transitions(segments, given, processors, monkeypatch) -> None:
    """By programs of 16 rows, or of 32; of more products than A have room, and of none."""
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: processors)
    call = call_of(case_of(tokens=CHUNK, value_heads=1))
    ends = torch.randn(2 * segments, 1, 2 * SIZE, SIZE)
    # States that nothing erases, and that hardly decay: an error of one direction would show.
    exact = torch.eye(SIZE) * 0.9990234 + 1e-3 * torch.randn(2 * segments, 1, SIZE, SIZE)
    upper = exact.bfloat16()
    halves = torch.stack([upper, (exact - upper.float()).bfloat16()], 2)
    ends.view(torch.bfloat16)[..., SIZE:, :] = halves.view(2 * segments, 1, SIZE, 2 * SIZE)
    initial = torch.randn(2, 1, SIZE, SIZE) if given else None
    call.values |= {"ends": ends, "halves": ends.view(torch.bfloat16)}
    starts = segment_scan_stage.starts(call, initial).unflatten(0, (2, segments)).double()
    states, each = ends[..., :SIZE, :].double().unflatten(0, (2, segments)), exact.double()
    each = each.unflatten(0, (2, segments))
    truth = [torch.zeros_like(states[:, 0]) if initial is None else initial, states[:, 0]]
    for i in range(1, segments - 1):
        truth.append(truth[-1] @ each[:, i] + states[:, i])
    for i, expected in enumerate(truth):
        assert relative_rms(starts[:, i], expected) < 2**-17, i
        size = (starts[:, i] * expected).sum() / expected.square().sum()
        assert (size - 1).abs() < 2**-20 or initial is None, i


def take_what_can_be(patch: pytest.MonkeyPatch) -> None:
    """On a CPU, too."""
    can = segment_scan_stage.can
    patch.setattr(segment_scan_stage, "suits", lambda call, goal: can(call.inputs, goal))


@pytest.mark.parametrize(("first", "decay"), [(False, "head"), (True, "head"), (False, "none")])
def test_a_forward_alone_is_that_of_the_definition(first, decay, monkeypatch) -> None:
    """First segments beside the ends of the others, or before them, and P made by the scans."""
    take_what_can_be(monkeypatch)
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(segment_scan_stage, "LEAST_CHUNKS", 1)
    run, ran, late = segment_scan_stage.run, [], []

    def either(*of: Any) -> None:
        ran.append((of[1], *of[5:]))
        if first and of[1] == "ends":
            late.append(of)
            return
        run(*of)
        while late:
            run(*late.pop())

    monkeypatch.setattr(segment_scan_stage, "run", either)
    case = case_of(decay, batch=2, tokens=8 * CHUNK, value_heads=1)
    if decay == "head":
        decays = case.tensors["log_decay"].clone()
        decays[:, 130], decays[:, 300] = -torch.inf, -200.0
        case = case.changed(log_decay=decays)
    inputs = call_of(case).inputs
    kept = room_of(monkeypatch)
    o, final, _ = passes.forward_stages.run(inputs, False)
    assert ran == [("ends", "later"), ("outputs", "first"), ("outputs", "later")]
    check_fused((o, final), case)
    # Of P there is no buffer.
    assert kept[0]["scores"] is None
    assert kept[0]["corrections"] is not None


@interpreted_by_triton
@pytest.mark.parametrize("state", [True, False])
def test_so_it_is_with_decays_per_channel_but_for_the_halves(state, monkeypatch) -> None:
    """Beside Triton's, whose interpreter has no bfloat16."""
    case = case_of("channel", batch=1, tokens=9 * CHUNK, value_heads=2).to(torch.float16)
    inputs = call_of(case).inputs
    inputs = inputs if state else inputs._replace(initial_state=None)
    expected = passes.forward_stages.run(inputs, False)[:2]
    can, ran = segment_scan_stage.can, runs_of(monkeypatch)
    monkeypatch.setattr(segment_scan_stage, "can", lambda x, goal: can(bfloat16_of(x), goal))
    take_what_can_be(monkeypatch)
    monkeypatch.setattr(segment_scan_stage, "halved", lambda call: None)
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(segment_scan_stage, "LEAST_CHUNKS", 1)
    found = passes.forward_stages.run(inputs, False)[:2]
    assert ran == [("ends", "later"), ("outputs", "first"), ("outputs", "later")]
    for x, y in zip(found, expected, strict=True):
        assert relative_rms(x, y.double()) < 2e-3


def runs_of(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The goals and the places of scans, as they run."""
    run, ran = segment_scan_stage.run, []
    patch.setattr(segment_scan_stage, "run", lambda *of: (ran.append((of[1], *of[5:])), run(*of)))
    return ran


def room_of(monkeypatch: pytest.MonkeyPatch) -> list[plan.Call]:
    """The calls for which room has been made."""
    kept, keep = [], passes.keep

    def noted(call: plan.Call, *of: Any) -> Tensor:
        kept.append(call)
        return keep(call, *of)

    monkeypatch.setattr(passes, "keep", noted)
    return kept


def test_so_it_is_in_the_segments_that_a_forward_that_keeps_has(monkeypatch) -> None:
    """A are halves all the same; tiles are wide, and P is made by the scores."""
    take_what_can_be(monkeypatch)
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: 1)
    ran = runs_of(monkeypatch)
    case = case_of(batch=1, tokens=6 * CHUNK, value_heads=1)
    inputs = call_of(case).inputs
    kept = room_of(monkeypatch)
    o, final, _ = passes.forward_stages.run(inputs, False)
    assert ran == [("ends", "all"), ("outputs", "all")]
    assert kept[0]["halves"] is not None
    assert kept[0]["scores"] is not None
    check_fused((o, final), case)
    # What is kept for a backward has A in float32.
    passes.forward_stages.run(inputs, True)
    assert kept[1]["halves"] is None


def test_only_first_segments_start_before_others_end(monkeypatch) -> None:
    """They read what was there before the ends began, which must wait for all before them."""
    monkeypatch.setattr(segment_scan_stage, "can_follow", lambda device: True)
    call = call_of(case_of(tokens=CHUNK))

    def starts(goal: str, places: str) -> bool:
        return segment_scan_stage.scan_launch(call, goal, False, places, True, False).constants[
            "launch_pdl"
        ]

    assert starts("outputs", "first")
    others = [("ends", "later"), ("outputs", "later"), ("ends", "all"), ("outputs", "all")]
    assert not any(starts(*of) for of in others)


@pytest.mark.parametrize(("programs", "makes"), [(1, False), (3, False), (3, True)])
def test_scores_are_those_that_a_fused_forward_saves(programs, makes, monkeypatch) -> None:
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: programs)
    case = case_of(tokens=5 * CHUNK)
    call, expected = call_of(case), saved_of(case)
    names = ("scores", "corrections", "scalings", "chunk_decay")[makes:]
    if makes:
        call.plan.made["makes_pairs"] = True
    shapes = kept_shapes(call, True)
    for name in names:
        shape, dtype = shapes[name]
        call.values[name] = torch.full(shape, torch.nan, dtype=dtype)
    segment_scan_stage.scores(call)
    for name in names:
        bar = 1e-5 if call[name].dtype == torch.float32 else 8e-3
        assert relative_rms(call[name], expected[name].double()) < bar, name


def test_a_call_alone_has_a_plan_of_its_own_where_narrow_tiles_fill_the_gpu(monkeypatch) -> None:
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: 132)
    take_what_can_be(monkeypatch)

    def planned(batch: int, tokens: int, heads: int, decay: str = "head") -> tuple[bool, int]:
        own = segment_scan_stage.alone(sized(decay, batch, tokens, heads)).plan
        return own.tile_key.narrow, own.per_segment

    assert planned(1, 32768, 8) == (True, 57)
    assert planned(2, 16384, 16) == (True, 86)
    assert planned(2, 16384, 16, "channel") == (True, 86)
    assert planned(2, 16384, 16, "none") == (True, 86)
    # Too many heads, and too few chunks.
    assert planned(1, 32768, 64) == (False, 0)
    assert planned(1, 1024, 8) == (False, 0)
    assert planned(1, 1024, 8, "none") == (False, 0)


def sized(decay: str, batch: int, tokens: int, heads: int) -> plan.Call:
    """A call without numbers."""
    inputs = call_of(case_of(decay, tokens=CHUNK, heads=heads, value_heads=heads)).inputs
    x = torch.empty(batch, tokens, heads, SIZE, dtype=torch.bfloat16, device="meta")
    inputs = inputs._replace(q=x, k=x, v=x)
    return plan.Call(inputs, plan.new_plan(inputs))


def test_without_decays_it_is_as_if_they_were_0_where_segments_are_its_own(monkeypatch) -> None:
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: 4)
    take_what_can_be(monkeypatch)
    few = sized("none", 1, 1024, 8)
    assert segment_scan_stage.alone(few) is few
    assert segment_scan_stage.alone(sized("none", 2, 16384, 16)).inputs.decay == "head"


def test_ends_per_channel_are_taken_whatever_the_last_round_of_programs(monkeypatch) -> None:
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: 64)
    by_head, by_channel = (sized(decay, 2, 16384, 16) for decay in ("head", "channel"))
    assert segment_scan_stage.programs_of(by_head, "ends") == 160
    assert not segment_scan_stage.fills(by_head, "ends")
    assert segment_scan_stage.fills(by_channel, "ends")


def test_segments_of_its_own_are_shorter_and_their_kernels_are_compiled_together(
    monkeypatch,
) -> None:
    monkeypatch.setattr(segment_scan_stage, "multiprocessors", lambda device: 132)
    case = case_of(batch=1, tokens=CHUNK, heads=4, value_heads=4)
    inputs = call_of(case).inputs
    key = call_of(case).plan.tile_key

    def asked(tokens: int, size: int, narrow: bool = True) -> tuple[int, Any]:
        x = torch.empty(1, tokens, 4, SIZE, dtype=torch.bfloat16, device="meta")
        here = inputs._replace(q=x, k=x, v=x)
        sizes = call_of(case).plan.sizes
        usual = plan.Plan(key._replace(narrow=narrow), tokens // CHUNK, sizes, size)
        return segment_scan_stage.segments_alone(here, usual), plan.kernel_key(here, usual)

    # 17 segments for 8 tiles: of 16 chunks they are no more than 16.
    assert asked(16384, 16)[0] == 0
    assert asked(16384, 17)[0] == 16
    assert asked(16384, 16, narrow=False)[0] == 16
    assert asked(16384, 0)[0] == 16
    assert asked(16384, 16)[1] != asked(4096, 4)[1] == asked(4096, 5)[1]


def test_a_plan_is_asked_once_and_a_call_for_its_scale_and_company_each_time(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(segment_scan_stage, "suits", lambda call, goal: not asked.append(goal))
    call = call_of(case_of(tokens=CHUNK))
    turned = plan.Call(call.inputs._replace(scale=-1.0), call.plan, call.given)
    joined = plan.Call(call.inputs, call.plan, call.given)
    joined.values["join"] = object()
    of = segment_scan_stage.takes
    assert not of(turned, "scores")
    assert of(call, "scores")
    assert of(call, "scores")
    assert of(turned, "outputs")
    assert not of(joined, "ends")
    assert of(call, "ends")
    assert not of(turned, "scores")
    assert asked == ["scores", "outputs", "ends"]
