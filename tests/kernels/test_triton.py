"""The step kernel without a GPU: values under the interpreter."""

import pytest
import torch

from oracle import DECAYS, make_case
from tolerance import assert_close, relative_rms

pytest.importorskip("triton")

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.triton import recurrent_step as triton_step

KINDS = [(decay, *erase) for decay in DECAYS for erase in (("none", 1), ("tied", 3), ("free", 1))]
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_on_gpu"
)


def step_inputs(case) -> Inputs:
    x, batch = case.tensors, case.tensors["q"].shape[0]
    log_decay = x["log_decay"]
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(batch, case.tensors["q"].shape[1], -1)
    scale = case.tensors["q"].shape[-1] ** -0.5
    return Inputs(
        x["q"], x["k"], x["v"], x["beta"], x["a"], x["b"], log_decay, None, None,
        case.n_steps, scale, case.normalize_qk, False,
    )  # fmt: skip


@interpreted
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


@interpreted
def test_float16_inputs_and_a_bfloat16_state() -> None:
    case = make_case("head", "tied", tokens=2, dtype=torch.float16)
    state = case.tensors["initial_state"].bfloat16()
    exact = case.changed(initial_state=state.float()).to(torch.float64).run("reference")
    o = triton_step.recurrent_step(step_inputs(case), state, None, -1)
    assert relative_rms(o, exact.o) < 2**-10
    assert relative_rms(state, exact.final_state) < 2**-8


@interpreted
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


@interpreted
def test_any_strides() -> None:
    case = make_case("channel", "free", tokens=3, dtype=torch.float32)
    turned = {
        name: case.tensors[name].transpose(1, -1).contiguous().transpose(1, -1)
        for name in case.present()
    }
    state = case.tensors["initial_state"].clone()
    o = triton_step.recurrent_step(step_inputs(case.changed(**turned)), state, None, -1)
    assert_close(o, case.to(torch.float64).run("reference").o, dtype=torch.float32)
