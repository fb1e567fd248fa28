"""The step kernel without a GPU: values under the interpreter."""

import pytest
import torch

from kernels.interpreted import inputs_of, interpreted
from logits import Logits, make_logits
from oracle import DECAYS, make_case
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")

from deltarule.ops.delta_rule.gate_maps import NO_MAPS, GateMaps
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import step as triton_step

KINDS = [(decay, *erase) for decay in DECAYS for erase in (("none", 1), ("tied", 3), ("free", 1))]
pytestmark = interpreted


def step_inputs(case) -> Inputs:
    return inputs_of(case, state=False)


@pytest.mark.parametrize(("key_size", "value_size"), [(8, 6), (5, 17), (1, 1)])
@pytest.mark.parametrize(("decay", "erase", "n_steps"), KINDS)
def test_steps_equal_the_definition(decay, erase, n_steps, key_size, value_size) -> None:
    case = make_case(
        decay, erase, batch=2, tokens=3, n_steps=n_steps, key_size=key_size,
        value_size=value_size, normalize_qk=erase != "free", dtype=torch.float32,
    )  # fmt: skip
    exact = case.to(torch.float64).run("reference")
    state = case.tensors["initial_state"].clone()
    o = triton_step.recurrent_step(step_inputs(case), state, None, -1)
    assert_close(o, exact.o, dtype=torch.float32)
    assert_close(state, exact.final_state, dtype=torch.float32)


def test_float16_inputs_and_a_bfloat16_state() -> None:
    case = make_case("head", "tied", tokens=2, dtype=torch.float16)
    state = case.tensors["initial_state"].bfloat16()
    exact = case.changed(initial_state=state.float()).to(torch.float64).run("reference")
    o = triton_step.recurrent_step(step_inputs(case), state, None, -1)
    assert relative_rms(o, exact.o) < 2**-10
    assert relative_rms(state, exact.final_state) < 2**-8


def test_only_indexed_slots_are_touched() -> None:
    case = make_case("channel", "tied", batch=4, tokens=2, dtype=torch.float32)
    pool = torch.randn(2, 7, 4, 6, 8)[1]
    before = pool.clone()
    indices = torch.tensor([5, -1, 0, -1], dtype=torch.int32)
    o = triton_step.recurrent_step(step_inputs(case), pool, indices, -1)
    assert (o[1::2] == 0).all()
    assert torch.equal(pool[[1, 2, 3, 4, 6]], before[[1, 2, 3, 4, 6]])
    rows = torch.tensor([0, 2])
    one = case.changed(**{name: case.tensors[name][rows] for name in case.present()})
    exact = one.changed(initial_state=before[[5, 0]]).to(torch.float64).run("reference")
    assert_close(o[rows], exact.o, dtype=torch.float32)
    assert_close(pool[[5, 0]], exact.final_state, dtype=torch.float32)


def test_any_strides() -> None:
    case = make_case("channel", "free", tokens=3, dtype=torch.float32)
    turned = {
        name: case.tensors[name].transpose(1, -1).contiguous().transpose(1, -1)
        for name in case.present()
    }
    state = case.tensors["initial_state"].clone()
    o = triton_step.recurrent_step(step_inputs(case.changed(**turned)), state, None, -1)
    assert_close(o, case.to(torch.float64).run("reference").o, dtype=torch.float32)


def step_of_logits(drawn: Logits, state: torch.Tensor, indices: torch.Tensor | None = None):
    logits, *parameters, lower_bound = drawn.decay
    inputs = step_inputs(drawn.case)._replace(beta=drawn.beta.logits, log_decay=logits)
    maps = GateMaps(*parameters, drawn.beta.beta_max, lower_bound)
    return triton_step.recurrent_step(inputs, state, indices, -1, maps)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("tokens", "n_steps"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_logits_equal_the_gates_made_first(decay, dtype, tokens, n_steps, strided) -> None:
    drawn = make_logits(decay, n_steps, dtype, strided=strided, tokens=tokens, key_size=5)
    exact, state = drawn.exact(), drawn.state()
    o = step_of_logits(drawn, state)
    assert relative_rms(o, exact.o) <= (1e-6 if dtype == torch.float32 else 2**-10)
    assert_close(state, exact.final_state, dtype=torch.float32)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_logits_of_a_decay_with_a_lower_bound(decay) -> None:
    drawn = make_logits(decay, tokens=2)
    drawn = drawn._replace(decay=drawn.decay._replace(lower_bound=-5.0))
    exact, state = drawn.exact(), drawn.state()
    assert_close(step_of_logits(drawn, state), exact.o, dtype=torch.float32)
    assert_close(state, exact.final_state, dtype=torch.float32)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_logits_with_a_pool_and_a_null_slot(decay) -> None:
    drawn = make_logits(decay, batch=3)
    exact, pool = drawn.exact(), torch.randn(5, 4, 6, 8)
    before = pool.clone()
    pool[[3, 1]] = drawn.state()[[0, 2]]
    o = step_of_logits(drawn, pool, torch.tensor([3, -1, 1]))
    assert_close(o[::2], exact.o[::2], dtype=torch.float32)
    assert (o[1] == 0).all()
    assert_close(pool[[3, 1]], exact.final_state[[0, 2]], dtype=torch.float32)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def test_extreme_logits_make_finite_gates() -> None:
    drawn = make_logits("channel")
    # What numpy's exponential, the interpreter's, takes without a warning.
    for x, large in ((drawn.decay.logits, 1e4), (drawn.beta.logits, 80.0)):
        x[:, 0], x[:, 1] = large, -large
    exact, state = drawn.exact(), drawn.state()
    assert_close(step_of_logits(drawn, state), exact.o, dtype=torch.float32)
    assert_close(state, exact.final_state, dtype=torch.float32)


@pytest.mark.parametrize("erase", ["tied", "free"])
def test_the_state_after_each_token_is_kept(erase: str) -> None:
    case = make_case("channel", erase, tokens=4, batch=2, dtype=torch.float32)
    before = case.tensors["initial_state"]
    inputs, state = step_inputs(case), before.clone()
    states = torch.zeros(2, 4, *before.shape[1:])
    triton_step.recurrent_step(inputs, state, None, -1, NO_MAPS, states)
    assert torch.equal(states[:, -1], state)
    for accepted in range(1, 4):
        again, first = before.clone(), slice(accepted)
        fewer = inputs._replace(**{
            name: x[:, first] for name in ("q", "k", "v", "beta", "a", "b", "log_decay")
            if (x := getattr(inputs, name)) is not None
        })  # fmt: skip
        triton_step.recurrent_step(fewer, again, None, -1)
        assert torch.equal(states[:, accepted - 1], again)
