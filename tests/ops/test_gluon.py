"""The fused forwards in Gluon, run on the CPU role by role: values, barriers, what it refuses."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from deltarule.doctor import chunked
from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.gluon import gradient_stage, stage
from deltarule.ops.delta_rule.gluon.channel_memory import RANGE
from deltarule.ops.delta_rule.triton.passes import keep, kept_shapes
from deltarule.ops.delta_rule.triton.plan import Call, new_plan
from deltarule.ops.delta_rule.triton.tiles import SCALING
from gluon_interpreter import Machine, Memory, interpret_launches
from kernels.interpreted import inputs_of
from oracle import Case, check_fused, make_case, run_module
from tolerance import assert_close_to_yardstick
from truth import assert_causal, rows_of

# What the order of events is drawn from.
ORDER = {"seed": 0}
GATES = ("q", "k", "v", "beta", "log_decay")
WIDE, SMALL = {"key_size": 128, "value_size": 128}, {"key_size": 64, "value_size": 64}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Launches of the fused kernels go through the interpreter."""
    interpret_launches(monkeypatch, lambda: ORDER["seed"])


def case_of(
    decay: str = "head", erase: str = "tied", strength: float = 1.0, **options: Any
) -> Case:
    """Log decays of `strength` times some -0.5; those per channel have states of 128 by 128."""
    sizes = {"batch": 1, "heads": 1, "value_heads": 2, "beta_max": 1.0}
    sizes |= {"key_size": 64, "value_size": 64, "dtype": torch.bfloat16}
    sizes |= WIDE if decay == "channel" else {}
    case = make_case(decay, erase, **(sizes | options))
    log_decay = case.tensors["log_decay"]
    return case if log_decay is None else case.changed(log_decay=log_decay * strength)


def run(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """o and the final state of the fused kernel."""
    ORDER["seed"] = seed
    inputs = inputs_of(case)
    assert stage.why_not_form(stage.in_parts(inputs)) is None
    return stage.forward_of(inputs)


def check(case: Case, stress: bool = False) -> None:
    check_fused(run(case), case, stress=stress)


def below_range(case: Case) -> float:
    """The part of the chunks in which a channel decays further than the fast form goes."""
    sums = case.tensors["log_decay"].float() / torch.log(torch.tensor(2.0))
    ends = torch.stack([x.sum(1) for x in sums.clamp(min=-127.0).split(64, dim=1)])
    return (ends.amin(-1) < -RANGE.value).double().mean().item()


FORMS = [(decay, erase) for decay in ("channel", "head", "none") for erase in ("none", "tied")]


UNIT, TWO_HEADS = {"normalize_qk": True}, {"heads": 2, "value_heads": 4}
BY_HEAD, NORMS, PACKED = FORMS[2:], ({}, UNIT), {"lengths": (3, 0, 70, 64, 1)}
TIED, TWICE = ("head", "tied"), {"heads": 2, "n_steps": 2}
SLOW = {"strength": 0.05, "dtype": torch.float16}
CALLS = [
    *((form, {"tokens": 150} | norm) for form in FORMS for norm in NORMS),
    *((form, {"tokens": 128} | WIDE) for form in BY_HEAD),
    *((form, {"tokens": 75} | TWICE | norm) for form in BY_HEAD for norm in NORMS),
    *((form, {"heads": 2} | UNIT | sizes) for form in BY_HEAD
      for sizes in ({"tokens": 150}, {"tokens": 128} | WIDE, PACKED)),
    *((form, PACKED | norm) for form in (*FORMS[:2], TIED) for norm in NORMS),
    *((TIED, {"lengths": (3, 0, 38, 32, 1), "n_steps": 2} | norm) for norm in NORMS),
    (TIED, {"tokens": 64, "n_steps": 2} | WIDE),
    (("constant", "tied"), {"tokens": 128, "batch": 2} | TWO_HEADS),
    # Of slow decays: of few tokens the roundings would be too few to average out.
    *((form, {"tokens": 150, "heads": 2} | SLOW | UNIT) for form in (("head", "none"), FORMS[4])),
    (("head", "none"), {"tokens": 130} | SLOW),
    # Heads in parts, and those that do not fill tiles.
    (TIED, {"tokens": 70, "value_size": 128} | UNIT),
    (TIED, {"lengths": (70, 3), "value_size": 192} | TWO_HEADS),
    (TIED, {"tokens": 64, "value_size": 128} | TWICE),
    (TIED, {"tokens": 70, "heads": 2, "key_size": 96, "value_size": 192} | UNIT),
    (TIED, {"lengths": (70, 64), "key_size": 80, "value_size": 112} | TWO_HEADS),
    (TIED, {"tokens": 75, "n_steps": 2, "key_size": 80, "value_size": 80}),
    (("head", "none"), {"tokens": 150, "heads": 2, "key_size": 96, "value_size": 128}),
    *((form, {"strength": 0.1, "tokens": 320} | TWO_HEADS) for form in FORMS[:2]),
    # Beyond the fast form.
    (FORMS[1], {"strength": 8.0, "lengths": (70, 64, 40), "heads": 2} | UNIT),
]  # fmt: skip


@pytest.mark.parametrize(("form", "options"), CALLS, ids=str)
def test_it_computes_the_definition(form, options) -> None:
    check(case_of(*form, **options))


def test_so_it_does_without_an_initial_state() -> None:
    check(case_of("channel", batch=2, tokens=128).changed(initial_state=None))


@pytest.mark.parametrize("strength", [4.0, 1000.0])
@pytest.mark.parametrize("erase", ["none", "tied"])
def test_channels_that_decay_beyond_the_range_of_the_fast_form(erase, strength) -> None:
    case = case_of("channel", erase, strength, tokens=150)
    assert below_range(case) > 0.3
    check(case)


def from_saved(call: Call, case: Case, states: bool) -> tuple[Tensor, Tensor]:
    """o and the final states by the equations of scan.py: from S and E of every chunk, or N."""
    v, o, final = case.tensors["v"].double(), torch.zeros(case.tensors["v"].shape).double(), []
    start = 0
    for n, length in enumerate(case.lengths or [v.shape[1]] * len(v)):
        row, number = (0, start // 64 + n) if case.lengths else (n, -(-length // 64) * n)
        end = call.inputs.initial_state[n].double()
        for first in range(0, length, 64):
            chunk = {name: call[name][number + first // 64] for name in call.saved}
            x = {name: y.double() for name, y in chunk.items()}
            at = start + first if case.lengths else first
            there = slice(at, at + min(64, length - first))
            before = x["states"] if states else end
            w = torch.zeros_like(x["write"])
            w[:, : there.stop - at] = v[row, there].transpose(0, 1)
            if "erase" in x:
                beta = x["scalings"][:, SCALING.BETA, :, None]
                w -= x["erase"] @ before.mT
                w = beta * (x["errors"] if states else w + x["corrections"] @ (beta * w))
            outputs = x["decayed_q"] @ before.mT + x["scores"] @ w
            o[row, there] = outputs.transpose(0, 1)[: there.stop - at]
            end = before * x["chunk_decay"][:, None] + w.mT @ x["write"]
        final.append(end)
        start += length
    return o, torch.stack(final)


def saved_of(case: Case, seed: int = 0) -> Call:
    """What the forward of channels leaves for a backward, under the names in `saved`."""
    ORDER["seed"] = seed
    inputs = inputs_of(case)
    call = Call(inputs, new_plan(inputs))
    keep(call, True).fill_(torch.nan)
    call.saved = [*kept_shapes(call, True)]
    stage.forward(call, True)
    return call


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("erase", ["tied", "none"])
@pytest.mark.parametrize(
    "options",
    [{"tokens": 150, "strength": 3.0}, {"lengths": (3, 0, 70, 64, 1), "normalize_qk": True}],
)
def test_what_is_saved_of_channels_makes_the_outputs_again(options, erase, states) -> None:
    case = case_of("channel", erase, **options)
    call = saved_of(case)
    # From states that are rounded follow others, but not the final one.
    found = from_saved(call, case, states)[: 1 if states else 2]
    dtype = case.tensors["q"].dtype
    truth = run_module(definition, case.to(torch.float64))
    yardstick = run_module(chunked, case.to(torch.float32), chunk_size=64, matmul_dtype=dtype)
    for name, x, y, z in zip(("o", "state"), found, truth, yardstick, strict=False):
        assert_close_to_yardstick(x.to(z.dtype), y, z, dtype=dtype, name=name)
    assert ((call["fast_rows"] < 64).any().item()) == ("strength" in options)


@pytest.mark.parametrize("erase", ["tied", "none"])
def test_whatever_the_order_of_events_the_same_is_saved(erase) -> None:
    case = case_of("channel", erase, tokens=64 * 5, value_heads=1)
    case.tensors["log_decay"][:, 60:64] *= 100.0
    first = saved_of(case, 1)
    for seed in range(2, 6):
        found = saved_of(case, seed)
        for name in first.saved:
            x, y = (
                x[name][:, :, SCALING.BETA] if name == "scalings" else x[name]
                for x in (found, first)
            )
            assert torch.equal(x, y), name


def test_one_channel_of_one_token_is_enough_to_leave_the_fast_form() -> None:
    case = case_of("channel", strength=0.05, tokens=128)
    decay = case.tensors["log_decay"].clone()
    decay[:, 70, 0, 127] = -torch.inf
    decay[:, 63, 1, 5] = -140.0
    case = case.changed(log_decay=decay)
    assert below_range(case) == 0.0
    decay[:, 71, 0, 127] = decay[:, 62, 1, 5] = -60.0
    assert below_range(case) == 0.5
    check(case)


@pytest.mark.parametrize("reset", [-torch.inf, -1e4, -90.0])
@pytest.mark.parametrize("of", ["heads", "channels of a head", "channels"])
def test_hard_resets_cost_what_follows_no_digits(of, reset) -> None:
    case = case_of("head" if of == "heads" else "channel", strength=0.05, tokens=150)
    decay = case.tensors["log_decay"]
    where = torch.rand((*decay.shape[:3], 1) if of == "channels of a head" else decay.shape)
    for part in (0.02, 0.5, 0.9) if of == "heads" else (0.02, 0.5):
        check(case.changed(log_decay=torch.where(where < part, reset, decay)))


def test_log_decays_that_lie_apart_or_in_float64() -> None:
    case = case_of("channel", tokens=70)
    decay = case.tensors["log_decay"]
    expected = run(case)
    for other in (decay.transpose(1, 3).contiguous().transpose(1, 3), decay.double()):
        for x, y in zip(run(case.changed(log_decay=other)), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("decay", "strength"), [("head", 1.0), ("channel", 0.1)])
def test_correlated_keys_and_a_strong_erase(decay, strength) -> None:
    case = case_of(decay, strength=strength, tokens=128, beta_max=2.0, **WIDE)
    k = torch.nn.functional.normalize(case.tensors["k"].float() + 0.3, dim=-1).bfloat16()
    check(case.changed(k=k), stress=True)


# A call whose channels leave the fast form first; then those that stay in it.
KINDS = [("channel", 6.0, 1), ("channel", 1.0, 1), ("head", 1.0, 1), ("head", 1.0, 2)]
every_kind = pytest.mark.parametrize(("decay", "strength", "n_steps"), KINDS)


@every_kind
def test_no_future_input_changes_the_past_bitwise(decay, strength, n_steps) -> None:
    tokens = 80 if decay == "channel" else 150 // n_steps
    case = case_of(decay, strength=strength, value_heads=1, tokens=tokens, n_steps=n_steps)
    assert_causal(case, lambda case: run(case)[0], (37, 64, tokens - 1), (1e4, 3.0))


@every_kind
def test_a_neighbour_of_nan_is_never_read(decay, strength, n_steps) -> None:
    options = {"n_steps": n_steps, "normalize_qk": decay == "channel"}
    case = case_of(decay, strength=strength, lengths=(70, 60), **options)
    expected, state = run(case)
    spoiled = {}
    for name in GATES:
        spoiled[name] = case.tensors[name].clone()
        spoiled[name][:, 70 * rows_of(case, name) :] = torch.nan
    found, spoiled_state = run(case.changed(**spoiled))
    assert torch.equal(found[:, :70], expected[:, :70])
    assert torch.equal(spoiled_state[0], state[0])


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("chunks", [2, 0, 1, 3, 5, 7])
@pytest.mark.parametrize("decay", ["channel", "head"])
def test_whatever_the_order_of_events_the_bits_are_the_same(
    decay, chunks, slots, monkeypatch
) -> None:
    size = 64 if chunks > 3 and decay == "head" else 128
    of = "channel" if decay == "channel" else (size, size)
    config = stage.CONFIGURATIONS[of]._replace(slots={"tied": slots, "none": slots})
    monkeypatch.setitem(stage.CONFIGURATIONS, of, config)
    erase = "none" if chunks == 5 and decay == "channel" else "tied"
    sizes = {"value_heads": 1, "key_size": size, "value_size": size}
    sizes |= {"tokens": 64 * chunks} if chunks else {"lengths": (0, 5)}
    case = case_of(decay, erase, **sizes)
    # The last tokens of some chunks leave the fast form.
    for last in (slice(60, 64), slice(190, 200)) if decay == "channel" else ():
        case.tensors["log_decay"][:, last] *= 100.0
    first = run(case, 1)
    for seed in (2, 3):
        for x, y in zip(run(case, seed), first, strict=True):
            assert torch.equal(x, y)


def broken(monkeypatch, decay: str, name: str, change: Any, **options: Any) -> None:
    monkeypatch.setattr(Machine, name, change)
    case = case_of(decay, tokens=64 * 5, value_heads=1, **WIDE, **options)
    expected = run_module(definition, case.to(torch.float64)).o
    for seed in range(4):
        o, _ = run(case, seed)
        if not (o.double() - expected).norm() <= 0.1 * expected.norm():
            raise AssertionError("wrong values")


both_kernels = pytest.mark.parametrize("decay", ["head", "channel"])


@both_kernels
def test_a_fence_that_is_left_out_is_seen(decay, monkeypatch) -> None:
    with pytest.raises(AssertionError, match="before a fence"):
        broken(monkeypatch, decay, "fence", lambda self: None)


def test_an_arrival_that_is_left_out_is_a_deadlock(monkeypatch) -> None:
    count = 0
    arrive = Machine.arrive

    def seldom(self: Machine, barrier: Any) -> None:
        nonlocal count
        count += 1
        if count % 13:
            arrive(self, barrier)

    with pytest.raises(AssertionError, match="deadlock"):
        broken(monkeypatch, "head", "arrive", seldom)


# State roles, the role of scores, and those that load, store, sum up or bring gates (of decays per
# channel two).
ROLES = [(decay, role) for decay, roles in (("head", 6), ("channel", 7)) for role in range(roles)]


@pytest.mark.parametrize(("decay", "role"), ROLES)
def test_a_role_that_does_not_wait_is_seen(role, decay, monkeypatch) -> None:
    wait = Machine.wait

    def impatient(self: Machine, barrier: Any, phase: Any) -> None:
        if self.role() == role + 1:
            self.step()
        else:
            wait(self, barrier, phase)

    with pytest.raises(AssertionError):
        broken(monkeypatch, decay, "wait", impatient, normalize_qk=decay == "head")


def test_a_product_that_nobody_waits_for_is_seen(monkeypatch) -> None:
    wait = Machine.product_wait
    with pytest.raises(AssertionError, match="before a wait"):
        broken(
            monkeypatch, "head", "product_wait", lambda self, left, deps: wait(self, left + 1, deps)
        )


def test_the_memory_of_the_interpreter_is_poisoned() -> None:
    memory = Machine(0, 0).allocate(torch.bfloat16, [2, 2], None)
    assert isinstance(memory, Memory)
    assert memory.data.isnan().all()


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"decay": "channel"} | SMALL, {}, r"= \(128, 128\), got \(64, 64\)"),
        ({"decay": "channel", "value_size": 64}, {}, r"got \(128, 64\)"),
        ({"decay": "channel", "dtype": torch.float16}, {}, "takes bfloat16, got torch.float16"),
        ({"decay": "channel", "n_steps": 2}, {}, "n_steps up to 1"),
        ({"n_steps": 3}, {}, "n_steps up to 2"),
        ({"key_size": 32}, {}, r"got \(32, 64\)"),
        ({"key_size": 48, "value_size": 48}, {}, r"from 80 to 128 .*, got \(48, 48\)"),
        ({"value_size": 80}, {}, r"steps of 16, .*got \(64, 80\)"),
        ({"key_size": 100, "value_size": 200}, {}, r"steps of 16, .*got \(100, 200\)"),
        ({"dtype": torch.float32}, {}, "takes bfloat16"),
        ({"dtype": torch.float16}, {}, "float16"),
        ({"erase": "none"}, dict.fromkeys("ab", torch.zeros(1)), "no free erase"),
        ({}, {"batch_invariant": True}, "batch_invariant"), ({}, {"scale": -1.0}, "scale"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_has_a_reason(options, changes, reason) -> None:
    inputs = inputs_of(case_of(**options))
    assert re.search(reason, stage.why_not_form(inputs._replace(**changes)) or "")


def test_on_a_cpu_it_is_not_taken() -> None:
    inputs = inputs_of(case_of())
    assert "CUDA" in (stage.why_not(inputs) or "")
    assert not stage.pays(inputs, new_plan(inputs))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [((128, 256), (2, 128)), ((96, 192), (2, 96)), ((64, 192), (3, 64)), ((128, 128), (1, 128)),
     ((96, 128), (1, 128)), ((112, 232), (1, 232)), ((80, 80), (1, 80))],
)  # fmt: skip
def test_parts_of_a_head_have_one_size(sizes, parts) -> None:
    inputs = inputs_of(case_of(tokens=1, key_size=sizes[0], value_size=sizes[1]))
    found = stage.in_parts(inputs)
    assert found.v.shape[2:] == (2 * parts[0], parts[1])
    assert (stage.why_not_form(found) is None) == (parts[1] <= 128)


def stage_says(monkeypatch, **answers: object) -> None:
    """What functions of the stage answer, whatever they are asked."""
    for name, answer in answers.items():
        monkeypatch.setattr(stage, name, lambda *_, answer=answer: answer)


@pytest.mark.parametrize("erase", ["none", "tied"])
def test_channels_are_taken_where_programs_fill_the_gpu(erase, monkeypatch) -> None:
    inputs = inputs_of(case_of("channel", erase))
    plan = new_plan(inputs)
    assert not stage.pays(inputs, plan)
    stage_says(monkeypatch, why_not=None, multiprocessors=132)
    assert not stage.pays(inputs, plan), "two programs"
    assert "for so few" in stage.place_in_order(inputs)
    stage_says(monkeypatch, multiprocessors=2)
    assert stage.pays(inputs, plan)
    assert stage.pays(inputs, plan, save=True)


def test_two_writes_a_token_are_taken_where_no_gradient_is_asked_for(monkeypatch) -> None:
    stage_says(monkeypatch, why_not=None, fills=True)
    twice = inputs_of(case_of(n_steps=2))
    assert stage.pays(twice, new_plan(twice))
    assert not stage.pays(twice, new_plan(twice), save=True)
    assert "uses this kernel here" in stage.place_in_order(twice)
    # Nobody is given unasked what no GPU has timed.
    monkeypatch.setattr(stage, "STEPS_TIMED", 1)
    assert not stage.pays(twice, new_plan(twice))
    assert "no GPU has timed" in stage.place_in_order(twice)


def test_heads_are_taken_in_parts_where_the_parts_fill_the_gpu(monkeypatch) -> None:
    stage_says(monkeypatch, why_not=None, multiprocessors=132)
    runs = []
    monkeypatch.setattr(gradient_stage, "runs", lambda call: bool(runs))
    sizes = {"batch": 8, "tokens": 1, "heads": 8, "value_heads": 8}
    half, full = {"key_size": 128, "value_size": 256}, {"key_size": 96, "value_size": 192}
    packed = {"lengths": (64,) * 8} | full
    others = {"batch": 1} | half, half, {"value_size": 128}, full, packed
    few, many, narrow, full, short = (inputs_of(case_of(**(sizes | of))) for of in others)
    assert stage.taken_in_parts(few, save=False) is few
    parts = stage.taken_in_parts(many, save=False)
    assert (parts.v.shape[2:], parts.initial_state.shape[1:]) == ((16, 128), (16, 128, 128))
    assert (parts.per_gate, many.per_gate) == (2, 1)
    assert "uses this kernel here" in stage.place_in_order(many)
    assert stage.taken_in_parts(narrow, save=False) is narrow
    assert stage.taken_in_parts(full, save=False).v.shape[2:] == (16, 96)
    assert stage.taken_in_parts(short, save=False) is short
    # A backward has to find what the gradients of chunks run on.
    assert stage.taken_in_parts(many, save=True) is many
    runs.append(1)
    assert stage.taken_in_parts(many, save=True).per_gate == 2


@pytest.mark.parametrize(
    ("rows", "heads", "size", "fills"),
    [(8, 16, 128, True), (5, 16, 128, True), (4, 16, 128, False), (8, 16, 64, True),
     (5, 32, 64, False), (10, 16, 128, True), (9, 16, 128, False), (8, 64, 128, True)],
)  # fmt: skip
def test_it_is_taken_where_programs_fill_132_multiprocessors(rows, heads, size, fills) -> None:
    case = case_of(batch=rows, tokens=1, value_heads=heads, key_size=size, value_size=size)
    assert stage.fills(inputs_of(case), 132) == fills
