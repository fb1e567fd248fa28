"""The fused forward with a decay per channel, run on the CPU role by role: values and barriers."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from deltarule import pack
from deltarule.ops.delta_rule import chunked, definition
from deltarule.ops.delta_rule.gluon import channel_stage, stage
from deltarule.ops.delta_rule.gluon.channel_memory import RANGE
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Call, new_plan
from gluon_interpreter import Machine, interpret_launches
from oracle import Case, make_case, run_module
from tolerance import assert_close_to_yardstick


class Seeded(NamedTuple):
    """What the order of events is drawn from."""

    seed: int


ORDER = Seeded(0)
GATES = ("q", "k", "v", "beta", "log_decay")
both_erases = pytest.mark.parametrize("erase", ["none", "tied"])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Launches of the fused kernel go through the interpreter."""
    interpret_launches(monkeypatch, lambda: ORDER.seed)


def case_of(erase: str = "tied", decay: float = 1.0, **options: Any) -> Case:
    """Log decays of `decay` times some -0.5 for each token and channel."""
    sizes = {"batch": 1, "heads": 1, "value_heads": 2, "beta_max": 1.0, "tokens": 150}
    sizes |= {"key_size": 128, "value_size": 128, "dtype": torch.bfloat16}
    case = make_case("channel", erase, **(sizes | options))
    return case.changed(log_decay=case.tensors["log_decay"] * decay)


def inputs_of(case: Case) -> Inputs:
    x = case.tensors
    offsets = None if case.lengths is None else pack(case.lengths)
    return Inputs(
        x["q"], x["k"], x["v"], x["beta"], None, None, x["log_decay"], x["initial_state"], offsets,
        1, x["q"].shape[-1] ** -0.5, case.normalize_qk, False,
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
    truth = run_module(definition, case.to(torch.float64))
    yardstick = run_module(
        chunked, case.to(torch.float32), chunk_size=64, matmul_dtype=torch.bfloat16
    )
    for name, x, y, z in (
        ("o", o, truth.o, yardstick.o.bfloat16()),
        ("state", state, truth.final_state, yardstick.final_state),
    ):
        assert_close_to_yardstick(x, y, z, dtype=torch.bfloat16, stress=stress, name=name)


def below_range(case: Case) -> float:
    """The part of the chunks in which a channel decays further than the fast form goes."""
    sums = case.tensors["log_decay"].float() / torch.log(torch.tensor(2.0))
    ends = torch.stack([x.sum(1) for x in sums.clamp(min=-127.0).split(64, dim=1)])
    return (ends.amin(-1) < -RANGE.value).double().mean().item()


@both_erases
@pytest.mark.parametrize("normalize", [False, True])
def test_it_computes_the_definition(erase, normalize) -> None:
    check(case_of(erase, normalize_qk=normalize))


@both_erases
def test_many_tokens_of_slow_decays_and_grouped_heads(erase) -> None:
    check(case_of(erase, 0.1, tokens=320, heads=2, value_heads=4))


def test_rows_of_a_batch_without_an_initial_state() -> None:
    check(case_of(batch=2, tokens=128).changed(initial_state=None))


@both_erases
@pytest.mark.parametrize("normalize", [False, True])
def test_packed_sequences(erase, normalize) -> None:
    check(case_of(erase, lengths=(3, 0, 70, 64, 1), normalize_qk=normalize))


@both_erases
@pytest.mark.parametrize("decay", [4.0, 1000.0])
def test_channels_that_decay_beyond_the_range_of_the_fast_form(erase, decay) -> None:
    case = case_of(erase, decay)
    assert below_range(case) > 0.3
    check(case)


def test_so_they_do_with_unit_norm_and_in_packed_sequences() -> None:
    check(case_of(decay=8.0, lengths=(70, 64, 40), normalize_qk=True, heads=2, value_heads=2))


@pytest.mark.parametrize("reset", [-torch.inf, -90.0])
@pytest.mark.parametrize("of", ["tokens", "channels"])
def test_hard_resets_cost_what_follows_no_digits(reset, of) -> None:
    case = case_of(tokens=100, decay=0.05)
    decay = case.tensors["log_decay"]
    where = torch.rand(decay.shape if of == "channels" else (*decay.shape[:3], 1))
    for part in (0.02, 0.5):
        check(case.changed(log_decay=torch.where(where < part, reset, decay)))


def test_one_channel_of_one_token_is_enough_to_leave_the_fast_form() -> None:
    case = case_of(tokens=128, decay=0.05)
    decay = case.tensors["log_decay"].clone()
    decay[:, 70, 0, 127] = -torch.inf
    decay[:, 63, 1, 5] = -140.0
    case = case.changed(log_decay=decay)
    assert below_range(case) == 0.0
    decay[:, 71, 0, 127] = decay[:, 62, 1, 5] = -60.0
    assert below_range(case) == 0.5
    check(case)


def test_log_decays_that_lie_apart_or_in_float64() -> None:
    case = case_of(tokens=70)
    decay = case.tensors["log_decay"]
    expected = run(case)
    for other in (decay.transpose(1, 3).contiguous().transpose(1, 3), decay.double()):
        for x, y in zip(run(case.changed(log_decay=other)), expected, strict=True):
            assert torch.equal(x, y)


def test_correlated_keys_and_a_strong_erase() -> None:
    case = case_of(tokens=128, beta_max=2.0, decay=0.1)
    k = torch.nn.functional.normalize(case.tensors["k"].float() + 0.3, dim=-1).bfloat16()
    check(case.changed(k=k), stress=True)


@pytest.mark.parametrize("decay", [1.0, 6.0])
def test_no_future_input_changes_the_past_bitwise(decay) -> None:
    case = case_of(decay=decay, value_heads=1, tokens=80)
    before, _ = run(case)
    for name in GATES:
        for t in (37, 64):
            for factor in (1e4, 3.0) if name == "log_decay" else (-0.7,):
                changed = case.tensors[name].clone()
                changed[:, t:] *= factor
                after, _ = run(case.changed(**{name: changed}))
                assert torch.equal(after[:, :t], before[:, :t]), f"{name} from {t} on"
                assert not torch.equal(after, before), name


@pytest.mark.parametrize("decay", [1.0, 6.0])
def test_a_neighbour_of_nan_is_never_read(decay) -> None:
    case = case_of(lengths=(70, 60), decay=decay, normalize_qk=True)
    expected, state = run(case)
    spoiled = {}
    for name in GATES:
        spoiled[name] = case.tensors[name].clone()
        spoiled[name][:, 70:] = torch.nan
    found, spoiled_state = run(case.changed(**spoiled))
    assert torch.equal(found[:, :70], expected[:, :70])
    assert torch.equal(spoiled_state[0], state[0])


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 5, 7])
def test_whatever_the_order_of_events_the_bits_are_the_same(chunks, slots, monkeypatch) -> None:
    monkeypatch.setattr(channel_stage, "SLOTS", slots)
    case = case_of(tokens=64 * chunks, value_heads=1, erase="none" if chunks == 5 else "tied")
    if chunks == 0:
        case = case_of(lengths=(0, 5), value_heads=1)
    decay = case.tensors["log_decay"]
    # The last tokens of some chunks leave the fast form.
    decay[:, 60:64] *= 100.0
    decay[:, 190:200] *= 100.0
    first = run(case, 1)
    for seed in (2, 3):
        for x, y in zip(run(case, seed), first, strict=True):
            assert torch.equal(x, y)


def broken(monkeypatch, name: str, change: Any) -> None:
    monkeypatch.setattr(Machine, name, change)
    case = case_of(tokens=64 * 5, value_heads=1)
    expected = run_module(definition, case.to(torch.float64)).o
    for seed in range(4):
        o, _ = run(case, seed)
        if not (o.double() - expected).norm() <= 0.1 * expected.norm():
            raise AssertionError("wrong values")


def test_a_fence_that_is_left_out_is_seen(monkeypatch) -> None:
    with pytest.raises(AssertionError, match="before a fence"):
        broken(monkeypatch, "fence", lambda self: None)


# State roles, the role of scores, and those that load, store, and bring decays and gates.
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


def test_it_is_not_taken_before_a_gpu_has_timed_it() -> None:
    inputs = inputs_of(case_of())
    assert not stage.is_timed(inputs)
    assert not stage.pays(inputs, new_plan(inputs))
    assert stage.is_timed(inputs._replace(log_decay=inputs.log_decay[..., 0]))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (case_of(value_size=64), r"got \(128, 64\)"),
        (case_of(dtype=torch.float16), "range of bfloat16, got torch.float16"),
    ],
)
def test_what_it_cannot_do_has_a_reason(case, reason) -> None:
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(stage.why_not_form(inputs_of(case)))


def test_a_free_erase_is_refused() -> None:
    x = case_of("none").tensors
    inputs = inputs_of(case_of("none"))._replace(a=x["log_decay"], b=x["log_decay"])
    assert "got a free one" in (stage.why_not_form(inputs) or "")
