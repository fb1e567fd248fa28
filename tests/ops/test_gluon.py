"""The fused forward in Gluon, run on the CPU role by role: values, barriers, what it refuses."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from deltarule import pack
from deltarule.ops.delta_rule import chunked, definition
from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Call, new_plan
from gluon_interpreter import Machine, Memory, interpret_launches
from oracle import Case, make_case, run_module
from tolerance import assert_close_to_yardstick


class Seeded(NamedTuple):
    """What the order of events is drawn from."""

    seed: int


ORDER = Seeded(0)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Launches of the fused kernel go through the interpreter."""
    interpret_launches(monkeypatch, lambda: ORDER.seed)


def case_of(decay: str = "head", erase: str = "tied", **options: Any) -> Case:
    sizes = {"batch": 1, "heads": 1, "value_heads": 2, "beta_max": 1.0}
    sizes |= {"key_size": 64, "value_size": 64, "dtype": torch.bfloat16}
    return make_case(decay, erase, **(sizes | options))


def inputs_of(case: Case) -> Inputs:
    x = case.tensors
    offsets = None if case.lengths is None else pack(case.lengths)
    decay = x["log_decay"]
    if decay is not None and decay.ndim == 1:
        decay = decay.expand(*x["q"].shape[:2], -1)
    return Inputs(
        x["q"], x["k"], x["v"], x["beta"], None, None, decay, x["initial_state"], offsets,
        case.n_steps, x["q"].shape[-1] ** -0.5, case.normalize_qk, False,
    )  # fmt: skip


def run(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """o and the final state of the fused kernel."""
    global ORDER
    ORDER = Seeded(seed)
    inputs = inputs_of(case)
    assert stage.why_not_form(inputs) is None
    return stage.forward(Call(inputs, new_plan(inputs)))


def check(case: Case, stress: bool = False) -> None:
    """Against float64, by the error of whole chunks of 64 in bfloat16."""
    o, state = run(case)
    dtype = case.tensors["q"].dtype
    truth = run_module(definition, case.to(torch.float64))
    options = {"chunk_size": 64 // case.n_steps, "matmul_dtype": dtype}
    yardstick = run_module(chunked, case.to(torch.float32), **options)
    for name, x, y, z in (
        ("o", o, truth.o, yardstick.o.to(dtype)),
        ("state", state, truth.final_state, yardstick.final_state),
    ):
        assert_close_to_yardstick(x, y, z, dtype=dtype, stress=stress, name=name)


FORMS = [(decay, erase) for decay in ("none", "head") for erase in ("none", "tied")]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_it_computes_the_definition(decay, erase, normalize) -> None:
    check(case_of(decay, erase, tokens=150, normalize_qk=normalize))


@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_so_it_does_for_states_of_128_by_128(decay, erase) -> None:
    check(case_of(decay, erase, tokens=128, key_size=128, value_size=128))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_two_writes_a_token(decay, erase, normalize) -> None:
    check(case_of(decay, erase, tokens=75, n_steps=2, normalize_qk=normalize, heads=2))


def test_so_it_does_with_two_for_states_of_128_by_128_and_packed() -> None:
    check(case_of(tokens=64, n_steps=2, key_size=128, value_size=128))
    check(case_of(lengths=(3, 0, 38, 32, 1), n_steps=2, normalize_qk=True))


def test_a_constant_decay_and_grouped_heads() -> None:
    check(case_of("constant", tokens=128, batch=2, heads=2, value_heads=4))


def test_float16_without_an_erase() -> None:
    case = case_of("head", "none", tokens=130, dtype=torch.float16)
    # Of slow decays: of few tokens the roundings would be too few to average out.
    check(case.changed(log_decay=case.tensors["log_decay"] * 0.05))


@pytest.mark.parametrize("normalize", [False, True])
def test_packed_sequences(normalize) -> None:
    check(case_of(lengths=(3, 0, 70, 64, 1), normalize_qk=normalize))


@pytest.mark.parametrize("reset", [-torch.inf, -1e4, -90.0])
def test_hard_resets_cost_what_follows_no_digits(reset) -> None:
    case = case_of(tokens=256)
    decay = case.tensors["log_decay"] * 0.05
    where = torch.rand_like(decay)
    check(case.changed(log_decay=torch.where(where < 0.1, reset, decay)))
    check(case.changed(log_decay=torch.where(where < 0.9, reset, decay)))


def test_correlated_keys_and_a_strong_erase() -> None:
    case = case_of(tokens=128, beta_max=2.0, key_size=128, value_size=128)
    k = torch.nn.functional.normalize(case.tensors["k"].float() + 0.3, dim=-1).bfloat16()
    check(case.changed(k=k), stress=True)


@pytest.mark.parametrize("n_steps", [1, 2])
def test_no_future_input_changes_the_past_bitwise(n_steps) -> None:
    case = case_of(tokens=150 // n_steps, n_steps=n_steps)
    before, _ = run(case)
    for name in ("q", "k", "v", "beta", "log_decay"):
        rows = n_steps if name in ("k", "v", "beta") else 1
        for t in (37, 64, 149 // n_steps):
            changed = case.tensors[name].clone()
            changed[:, t * rows :] *= 20.0 if name == "log_decay" else -0.7
            after, _ = run(case.changed(**{name: changed}))
            assert torch.equal(after[:, :t], before[:, :t]), f"{name} from {t} on"
            assert not torch.equal(after, before), name


@pytest.mark.parametrize("n_steps", [1, 2])
def test_a_neighbour_of_nan_is_never_read(n_steps) -> None:
    case = case_of(lengths=(70, 60), n_steps=n_steps)
    expected, state = run(case)
    spoiled = {}
    for name in ("q", "k", "v", "beta", "log_decay"):
        rows = n_steps if name in ("k", "v", "beta") else 1
        spoiled[name] = case.tensors[name].clone()
        spoiled[name][:, 70 * rows :] = torch.nan
    found, spoiled_state = run(case.changed(**spoiled))
    assert torch.equal(found[:, :70], expected[:, :70])
    assert torch.equal(spoiled_state[0], state[0])


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 5, 7])
def test_whatever_the_order_of_events_the_bits_are_the_same(chunks, slots, monkeypatch) -> None:
    size = 64 if chunks > 3 else 128
    config = stage.CONFIGURATIONS[size, size]._replace(slots=slots)
    monkeypatch.setitem(stage.CONFIGURATIONS, (size, size), config)
    case = case_of(tokens=64 * chunks, value_heads=1, key_size=size, value_size=size)
    if chunks == 0:
        case = case_of(lengths=(0, 5), value_heads=1)
    first = run(case, 1)
    for seed in (2, 3):
        for x, y in zip(run(case, seed), first, strict=True):
            assert torch.equal(x, y)


def broken(monkeypatch, name: str, change: Any) -> None:
    monkeypatch.setattr(Machine, name, change)
    case = case_of(tokens=64 * 5, value_heads=1, key_size=128, value_size=128)
    expected = run_module(definition, case.to(torch.float64)).o
    for seed in range(4):
        o, _ = run(case, seed)
        if not (o.double() - expected).norm() <= 0.1 * expected.norm():
            raise AssertionError("wrong values")


def test_a_fence_that_is_left_out_is_seen(monkeypatch) -> None:
    with pytest.raises(AssertionError, match="before a fence"):
        broken(monkeypatch, "fence", lambda self: None)


def test_an_arrival_that_is_left_out_is_a_deadlock(monkeypatch) -> None:
    count = 0
    arrive = Machine.arrive

    def seldom(self: Machine, barrier: Any) -> None:
        nonlocal count
        count += 1
        if count % 13:
            arrive(self, barrier)

    with pytest.raises(AssertionError, match="deadlock"):
        broken(monkeypatch, "arrive", seldom)


# State roles, the role of scores, and those that load, store, and sum up.
@pytest.mark.parametrize("role", range(6))
def test_a_role_that_does_not_wait_is_seen(role, monkeypatch) -> None:
    wait = Machine.wait

    def impatient(self: Machine, barrier: Any, phase: Any) -> None:
        if self.role() == role + 1:
            self.step()
        else:
            wait(self, barrier, phase)

    with pytest.raises(AssertionError):
        broken(monkeypatch, "wait", impatient)


def test_a_product_that_nobody_waits_for_is_seen(monkeypatch) -> None:
    wait = Machine.product_wait
    with pytest.raises(AssertionError, match="before a wait"):
        broken(monkeypatch, "product_wait", lambda self, left, deps: wait(self, left + 1, deps))


def test_the_memory_of_the_interpreter_is_poisoned() -> None:
    memory = Machine(0, 0).allocate(torch.bfloat16, [2, 2], None)
    assert isinstance(memory, Memory)
    assert memory.data.isnan().all()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (
            case_of("channel"),
            "of decays per channel has \\(K, V\\) = \\(128, 128\\), got \\(64, 64\\)",
        ),
        (case_of(n_steps=3), "2 times a token"),
        (case_of("channel", n_steps=2), "1 times a token"),
        (case_of(key_size=32), "got \\(32, 64\\)"),
        (case_of(dtype=torch.float32), "takes bfloat16"),
        (case_of(dtype=torch.float16), "float16"),
    ],
)
def test_what_it_cannot_do_has_a_reason(case, reason) -> None:
    inputs = inputs_of(case)
    assert stage.why_not_form(inputs) is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(stage.why_not_form(inputs))


def test_it_keeps_out_of_calls_that_do_not_depend_on_the_batch() -> None:
    inputs = inputs_of(case_of())
    assert "batch_invariant" in (stage.why_not_form(inputs._replace(batch_invariant=True)) or "")
    assert "scale" in (stage.why_not_form(inputs._replace(scale=-1.0)) or "")
    assert "CUDA" in (stage.why_not(inputs) or "")
    assert not stage.pays(inputs, new_plan(inputs))


def test_nobody_is_given_two_writes_a_token_unasked(monkeypatch) -> None:
    for name, found in {"why_not": None, "fills": True}.items():
        monkeypatch.setattr(stage, name, lambda *_, found=found: found)
    once, twice = (inputs_of(case_of(n_steps=n)) for n in (1, 2))
    assert stage.pays(once, new_plan(once))
    assert not stage.pays(twice, new_plan(twice))
    assert "no GPU has timed" in stage.place_in_order(twice)
    monkeypatch.setattr(stage, "STEPS_TIMED", 2)
    assert stage.pays(twice, new_plan(twice))
    assert not stage.pays(twice, new_plan(twice), save=True)


@pytest.mark.parametrize(
    ("rows", "heads", "size", "fills"),
    [(8, 16, 128, True), (5, 16, 128, True), (4, 16, 128, False), (8, 16, 64, True),
     (5, 32, 64, False), (10, 16, 128, True), (9, 16, 128, False), (8, 64, 128, True)],
)  # fmt: skip
def test_it_is_taken_where_programs_fill_132_multiprocessors(rows, heads, size, fills) -> None:
    case = case_of(batch=rows, tokens=1, value_heads=heads, key_size=size, value_size=size)
    assert stage.fills(inputs_of(case), 132) == fills
