"""The gradients in Gluon, run on the CPU role by role, beside Triton's and beside the definition.

Three kernels: of chunks; the scan back and the gradients as one; and of chunks with a decay per
channel.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon import channel_gradients, gradient_stage, stage
from deltarule.ops.delta_rule.triton import channel_stages, passes, plan
from deltarule.ops.delta_rule.triton.plan import Call, new_plan
from gluon_interpreter import LAUNCHED, interpret_launches
from kernels.interpreted import inputs_of
from kernels.interpreted import interpreted as interpreted_by_triton
from kernels.test_windows import cut_into
from oracle import Case, check_fused, check_fused_gradients, make_case, weights
from tolerance import relative_rms

# What the order of events is drawn from.
ORDER = {"seed": 0}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Launches go through the interpreter, on a GPU of a few multiprocessors."""
    monkeypatch.setitem(ORDER, "seed", 0)
    interpret_launches(monkeypatch, lambda: ORDER["seed"])
    monkeypatch.setattr(gradient_stage, "multiprocessors", lambda device: 3)


def case_of(decay: str, erase: str, **options: Any) -> Case:
    sizes = {"batch": 1, "heads": 2, "value_heads": 2, "beta_max": 1.0, "tokens": 192}
    sizes |= {"key_size": 64, "value_size": 64, "dtype": torch.bfloat16}
    return make_case(decay, erase, **(sizes | options))


# ---- beside Triton's ----------------------------------------------------------------------------


def compare_passes(
    case: Case, take: Callable[[], None], *, save: bool = True, orders: int = 1,
    alone: bool = False,
) -> None:  # fmt: skip
    """Both passes by the fused kernels, once they are taken, beside Triton's.

    orders: Of events, in all of which they have the same bits.
    alone: Forwards that save nothing, too, with and without initial states, and a backward
        without a gradient by the final one.
    """
    # Triton's interpreter has no arithmetic in bfloat16.
    case = case.to(torch.float16)
    inputs, (d_o, d_final) = inputs_of(case), weights(case)

    def outputs_and_gradients() -> list[Tensor | None]:
        *found, kept = passes.forward(inputs, save)
        assert not save or kept.shape == passes.saved_shape(inputs)
        for end in (d_final.float(), None)[: 1 + alone]:
            found += passes.backward(d_o.half(), end, inputs, kept)
        for own in (inputs, inputs._replace(initial_state=None))[: 2 * alone]:
            found += passes.forward(own, False)[:2]
        return found

    expected = outputs_and_gradients()
    assert not LAUNCHED
    take()
    found = outputs_and_gradients()
    assert LAUNCHED
    for x, y in zip(found, expected, strict=True):
        assert (None if x is None else x.shape) == (None if y is None else y.shape)
        # As near as 16 bits allow.
        assert x is None or relative_rms(x, y.double()) < 2e-3
    for ORDER["seed"] in range(1, orders):
        for x, y in zip(outputs_and_gradients(), found, strict=True):
            assert x is None or torch.equal(x, y), "another order of events"


def take(patch: pytest.MonkeyPatch, *kernels: str) -> None:
    """Have these taken, however small the call."""
    if "forward" in kernels:
        patch.setattr(stage, "pays", lambda *_: True)
    if "chunks" in kernels:
        patch.setattr(gradient_stage, "runs", lambda call: True)
    if "whole" in kernels:
        patch.setattr(gradient_stage, "takes_whole", lambda call: True)
    if "channels" in kernels:
        taken = lambda call: gradient_stage.channel_gradients  # noqa: E731
        patch.setattr(channel_stages, "fastest_gradients", taken)
        # Before it the exact kernels: float16 has less room.
        patch.setattr(channel_stages, "has_fast_form", lambda inputs: True)
        for name, value in (("SHIFT", 4.0), ("RANGE", 8.0)):
            patch.setattr(channel_stages, name, value)
        for name, value in (("SHIFT", 4.0), ("UNSHIFT", 2.0**-4)):
            patch.setattr(channel_gradients, name, gl.constexpr(value))


WIDE = {"key_size": 128, "value_size": 128}
RAGGED, PACKED = {"tokens": 150, "batch": 2}, {"lengths": (3, 0, 70, 64, 1)}
UNIT, GROUPED = {"normalize_qk": True}, {"value_heads": 4}
RULES = [(decay, erase) for decay in ("head", "none") for erase in ("tied", "none")]
# States of other sizes, and heads that do not fill tiles.
SIZES = [(128, 128), (96, 96), (112, 128), (128, 80)]
SIZED = [{"key_size": keys, "value_size": values} for keys, values in SIZES]


@interpreted_by_triton
@pytest.mark.parametrize("kernels", [("chunks",), ("chunks", "forward")], ids="-".join)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((rule, norm) for rule in RULES for norm in (UNIT, {})),
        *((rule, GROUPED | (UNIT if rule[1] == "tied" else {}) | form)
          for rule in RULES for form in (RAGGED, PACKED)),
        *((rule, {"value_heads": 6}) for rule in RULES),
        *((RULES[0], sizes | form) for sizes in SIZED for form in ({}, RAGGED | UNIT, PACKED)),
    ],
)  # fmt: skip
def test_gradients_of_chunks_are_those_of_triton(rule, options, kernels, monkeypatch) -> None:
    forward = "forward" in kernels
    take_them = lambda: take(monkeypatch, *kernels)  # noqa: E731
    compare_passes(case_of(*rule, **options), take_them, orders=1 if forward else 2, alone=forward)


@interpreted_by_triton
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((rule, WIDE | form) for rule in RULES for form in (UNIT, {}, RAGGED, PACKED)),
        *((("head", erase), sizes | form) for erase in ("tied", "none") for sizes in SIZED[1:]
          for form in ({}, RAGGED, PACKED)),
    ],
)  # fmt: skip
def test_so_are_those_of_whole_backwards(rule, options, monkeypatch) -> None:
    # Without decays a forward in bfloat16 keeps no scores, and one in float16 does.
    kernels = ("whole", "forward")[: 1 + (rule[0] == "head")]
    orders = 3 if rule == RULES[0] else 1
    take_them = lambda: take(monkeypatch, *kernels)  # noqa: E731
    compare_passes(case_of(*rule, **options), take_them, orders=orders)


@interpreted_by_triton
@pytest.mark.parametrize("erase", ["tied", "none"])
@pytest.mark.parametrize(
    "form", [{"tokens": 128} | UNIT, {"tokens": 100, "batch": 2}, {"lengths": (3, 0, 70)}]
)
def test_so_are_those_with_a_decay_per_channel(erase, form, monkeypatch) -> None:
    case = case_of("channel", erase, heads=1, value_heads=1, **WIDE, **form)
    decay = case.tensors["log_decay"] * 0.05
    # 64 of these come nearly to the end of the fast form, and one is beyond it.
    decay[..., ::2] = -0.08
    decay[:, 70, :, 1] = -7.0
    case = case.changed(log_decay=decay)
    compare_passes(case, lambda: take(monkeypatch, "channels"), orders=3)


def test_the_shift_of_both_kernels_is_one() -> None:
    """Which the test above makes smaller."""
    shift = channel_gradients.SHIFT.value
    assert (shift, channel_gradients.UNSHIFT.value) == (channel_stages.SHIFT, 2.0**-shift)


@interpreted_by_triton
@pytest.mark.parametrize("kernel", ["chunks", "whole"])
def test_so_they_are_where_they_are_reset(kernel, monkeypatch) -> None:
    case = case_of("head", "tied", tokens=100, **(WIDE if kernel == "whole" else {}))
    decay = case.tensors["log_decay"] * 0.05
    where = torch.rand_like(decay) < 0.1
    where[:, 64:67] = True
    case = case.changed(log_decay=decay.masked_fill(where, -200.0))
    compare_passes(case, lambda: take(monkeypatch, kernel, "forward"))


@interpreted_by_triton
@pytest.mark.parametrize("sizes", [RAGGED, {"lengths": (70, 64)}])
@pytest.mark.parametrize("rule", RULES[:3])
def test_so_are_those_of_parts_of_heads(rule, sizes, monkeypatch) -> None:
    def take_parts() -> None:
        monkeypatch.setattr(stage, "pays", lambda inputs, *_: inputs.v.shape[3] == 64)
        monkeypatch.setattr(stage, "LEAST_KEYS", 64)
        take(monkeypatch, "chunks")

    case = case_of(*rule, value_size=128, value_heads=4, **sizes)
    compare_passes(case, take_parts, alone=True)


@interpreted_by_triton
@pytest.mark.parametrize(
    ("kernel", "save", "parts", "segment"),
    [
        *(("chunks", True, 1, segment) for segment in (2, 0)),
        *(("chunks", False, 1, segment) for segment in (2, 0)),
        # Windows and segments at once are Triton's.
        ("chunks", False, 2, 0), *(("whole", True, 1, segment) for segment in (2, 0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("erase", ["tied", "none"])
def test_so_are_those_of_segments_and_of_windows(
    erase, segment, kernel, save, parts, monkeypatch
) -> None:
    monkeypatch.setattr(plan, "chunks_per_segment", lambda *shapes: segment)
    cut_into(parts, monkeypatch)
    case = case_of("head", erase, batch=2, tokens=256, heads=1, value_heads=1, **WIDE)
    compare_passes(case, lambda: take(monkeypatch, kernel), save=save)


@interpreted_by_triton
@pytest.mark.parametrize("form", [RAGGED, PACKED])
def test_so_are_those_of_windows_of_chunks_that_are_not_whole(form, monkeypatch) -> None:
    cut_into(2, monkeypatch)
    case = case_of("head", "tied", **GROUPED, **form)
    compare_passes(case, lambda: take(monkeypatch, "chunks"), save=False)


# ---- beside the definition ----------------------------------------------------------------------


FORMS = [*((rule, norm) for rule in RULES for norm in (UNIT, {})), (RULES[0], {"tokens": 150})]


@pytest.mark.parametrize(("rule", "options"), [*FORMS, (RULES[0], PACKED), (RULES[2], RAGGED)])
def test_a_forward_and_a_whole_backward_are_those_of_the_definition(
    rule, options, monkeypatch
) -> None:
    """In bfloat16, with nothing of Triton's; gradients may take the place of what was saved."""
    monkeypatch.setattr(stage, "taken_in_parts", lambda inputs, _: inputs)
    take(monkeypatch, "forward", "whole")
    case = case_of(*rule, **({"batch": 2} | WIDE | options))
    # Keys that are not of unit norm before.
    case = case.changed(k=case.tensors["k"] * (3.0 if case.normalize_qk else 1.0))
    d_o, d_final = weights(case)
    inputs, given = inputs_of(case), (d_o.bfloat16(), d_final.float())

    def gradients(kept: Tensor, spent: bool) -> list[Tensor]:
        found = passes.gradient_stages.run(inputs, *given, kept, spent)
        return [x for x in found if x is not None]

    o, final, kept = passes.forward(inputs, True)
    repeated = [gradients(kept, spent=False) for _ in range(2)]
    inside = gradients(kept, spent=True)
    check_fused((o, final), case)
    if not case.normalize_qk or rule[0] == "none":
        # With decays norms take the roundings of so few heads further than the bars allow for.
        by_name = dict(zip(case.present(), inside, strict=True))
        check_fused_gradients(by_name, case, given, stress=case.normalize_qk)
    places = [x.data_ptr() - kept.data_ptr() for x in inside]
    lent = sum(0 <= place < kept.nbytes for place in places)
    whole = case.tensors["q"].shape[1] % 64 == 0 and case.lengths is None
    assert lent == whole * (2 if rule[1] == "none" else 3)
    # Tensors of their own: what is done to one in place is not done to the others.
    version = inside[0]._version
    inside[1].add_(0)
    assert (inside[0]._version, inside[0]._is_view()) == (version, False)
    monkeypatch.setattr(gradient_stage, "lends", lambda call: False)
    expected = gradients(passes.forward(inputs, True)[2], spent=True)
    for found in (*repeated, inside):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_whole_backward_ends_in_any_order_of_events(monkeypatch) -> None:
    """Four chunks: one role may be a chunk behind another."""
    take(monkeypatch, "forward", "whole")
    case = case_of("head", "tied", tokens=256, **WIDE, **UNIT)
    d_o, d_final = weights(case)
    inputs, given = inputs_of(case), (d_o.bfloat16(), d_final.float())
    kept = passes.forward(inputs, True)[2]
    expected = passes.gradient_stages.run(inputs, *given, kept, False)
    for ORDER["seed"] in range(1, 13):
        found = passes.gradient_stages.run(inputs, *given, kept, False)
        assert all(
            x is y is None or torch.equal(x, y) for x, y in zip(found, expected, strict=True)
        )


def test_norms_that_a_forward_left_are_not_computed_again(monkeypatch) -> None:
    launched: list[Tensor] = []
    inputs = inputs_of(case_of("head", "tied", normalize_qk=True))
    monkeypatch.setattr(passes, "fused_stage", lambda _: stage)
    take(monkeypatch, "forward")
    launch = lambda grid, q, k, norms, rows: launched.append(norms)  # noqa: E731
    monkeypatch.setattr(stage, "norms_launch", lambda _: launch)
    call = Call(inputs, new_plan(inputs))
    kept = torch.empty(passes.kept_shapes(call, True)["norms"][0])
    # A forward; a backward of what it kept, and one that computes it again.
    for again, launches in ((None, 1), (False, 1), (True, 2)):
        call.values |= {"norms": kept, "again": again}
        assert stage.norms_of(call) is kept
        assert [*map(id, launched)] == [id(kept)] * launches


# By sequences of 4,096 tokens and heads, on 132 multiprocessors.
@pytest.mark.parametrize(
    ("decay", "erase", "batch", "options", "takes"),
    [
        ("head", "tied", 8, {}, True), ("head", "tied", 6, {}, False),
        ("head", "tied", 6, {"value_heads": 32}, False), ("none", "tied", 7, {}, True),
        ("head", "none", 5, {}, True), ("head", "none", 9, {}, False),
        ("head", "tied", 8, UNIT, True), ("head", "tied", 7, UNIT, False),
        ("head", "tied", 1, {"lengths": (256,) * 16}, False),
        ("head", "tied", 1, {"lengths": (64,) * 64}, True),
    ],
)  # fmt: skip
def test_the_whole_is_taken_where_its_programs_fill_the_gpu(
    decay, erase, batch, options, takes, monkeypatch
) -> None:
    take(monkeypatch, "chunks")
    monkeypatch.setattr(gradient_stage, "multiprocessors", lambda device: 132)
    sizes = {"heads": 16, "value_heads": 16, "batch": batch, "tokens": 64, **WIDE}
    inputs = inputs_of(case_of(decay, erase, **(sizes | options)))
    assert gradient_stage.takes_whole(Call(inputs, new_plan(inputs))) == takes
