"""The products of sm_90 and of sm_100 in Gluon, run on the CPU: the same numbers in either form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.gluon.memory import CHUNK, Form, product
from deltarule.ops.delta_rule.gluon.products import (
    finish,
    operand,
    put,
    start,
    state_places,
    tell,
    value,
)
from deltarule.ops.runtime.gluon_tiles import square
from gluon_interpreter import Machine, interpret_launches
from gluon_interpreter import run as launched
from kernels.interpreted import inputs_of
from ops import test_gluon as forward
from ops import test_gluon_gradients as backward


@gluon.jit
def products_role(
    x, b, out, tile, places, BEFORE: gl.constexpr, TOLD: gl.constexpr, WAIT: gl.constexpr
):
    """out = (x + x b + 1) b + (x + x b + 1), with one sum that goes on; what is left out fails."""
    LAYOUT: gl.constexpr = product(CHUNK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))[None, :]
    address = row * CHUNK + column
    tile.store(gl.load(b + address))
    fence_async_shared()
    left = operand(places.low_values, gl.load(x + address).to(gl.bfloat16), LEFT)
    total = put(places.out, gl.load(x + address))
    total = start(places.out, left, tile, total)
    if TOLD:
        tell(places.has_out)
    if WAIT:
        total = finish((total,), places.has_out, 0)
    total = value(total, LAYOUT) + 1.0
    if BEFORE:
        left = operand(places.low_values, total.to(gl.bfloat16), LEFT)
    total = start(places.out, left, tile, total)
    tell(places.has_state)
    if not BEFORE:
        left = operand(places.low_values, value(total, LAYOUT).to(gl.bfloat16), LEFT)
    total = finish((total,), places.has_state, 0)
    gl.store(out + address, value(total, LAYOUT))


@gluon.jit
def products_kernel(
    x, b, out, FORM: gl.constexpr, BEFORE: gl.constexpr = True, TOLD: gl.constexpr = True,
    WAIT: gl.constexpr = True,
):  # fmt: skip
    """One role alone."""
    tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], square())
    places = state_places(gl.bfloat16, FORM)
    gl.warp_specialize(
        [(products_role, (x, b, out, tile, places, BEFORE, TOLD, WAIT))], [], []
    )  # fmt: skip


def computed(tensor: bool, seed: int = 0, **options: bool) -> tuple[Tensor, Tensor]:
    """What the kernel leaves, and float64."""
    x = torch.randint(-3, 4, (64, 64)).float()
    b = torch.randint(-1, 2, (64, 64)).to(torch.bfloat16) * 0.125
    out = torch.full((64, 64), torch.nan)
    form = Form(TIED=False, DECAY=False, UNIT=False, ENDS="whole", K=64, PARTS=1, TENSOR=tensor)
    launched(products_kernel, 1, {"x": x, "b": b, "out": out, "FORM": form, **options}, seed)
    total = x.double() + x.double() @ b.double() + 1.0
    return out, total + total.bfloat16().double() @ b.double()


@pytest.mark.parametrize("tensor", [False, True])
def test_products_are_those_of_matrices(tensor) -> None:
    found, expected = computed(tensor)
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [("TOLD", "deadlock"), ("WAIT", "before a wait"), ("BEFORE", "before a wait")],
)
def test_what_is_left_out_in_tensor_memory_is_seen(left_out, reason) -> None:
    def several() -> None:
        for seed in range(20):
            computed(True, seed, **{left_out: False})

    with pytest.raises(AssertionError, match=reason):
        several()


@pytest.fixture
def tensor_memory(monkeypatch) -> Any:
    """Turns the fused kernels into those of sm_100, run by the interpreter."""
    interpret_launches(monkeypatch, lambda: forward.ORDER["seed"])
    return lambda on: monkeypatch.setattr(stage, "has_tensor_memory", lambda device: on)


FORMS = [(decay, erase) for decay in ("none", "head") for erase in ("none", "tied")]


@pytest.mark.parametrize(("decay", "erase"), FORMS)
@pytest.mark.parametrize(("normalize", "n_steps"), [(False, 1), (True, 1), (True, 2)])
def test_a_forward_has_the_bits_of_sm_90(decay, erase, normalize, n_steps, tensor_memory) -> None:
    case = forward.case_of(
        decay, erase, tokens=150 // n_steps, normalize_qk=normalize, n_steps=n_steps
    )
    expected = forward.run(case)
    tensor_memory(True)
    for seed in (0, 1):
        for x, y in zip(forward.run(case, seed), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_so_it_has_for_states_of_128_by_128_that_are_saved(decay, erase, tensor_memory) -> None:
    sizes = {"heads": 1, "value_heads": 1, "key_size": 128, "value_size": 128}
    case = backward.case_of(decay, erase, **sizes)
    expected = forward.saved_of(case)
    tensor_memory(True)
    found = forward.saved_of(case)
    for name in found.saved:
        assert torch.equal(found[name].nan_to_num(), expected[name].nan_to_num()), name


@pytest.mark.parametrize("role", range(3))
def test_a_role_that_does_not_wait_for_tensor_memory_is_seen(
    role, tensor_memory, monkeypatch
) -> None:
    tensor_memory(True)
    case = forward.case_of(tokens=64 * 5, value_heads=1, key_size=128, value_size=128)
    wait, expected = Machine.wait, forward.run(case)

    def impatient(self: Machine, barrier: Any, phase: Any) -> None:
        # Barriers that tensor cores tell: of one arrival, and of nobody else's.
        if self.role() == role + 1 and barrier in self.told:
            self.step()
        else:
            wait(self, barrier, phase)

    def several() -> None:
        for seed in range(4):
            assert torch.equal(forward.run(case, seed)[0], expected[0])

    monkeypatch.setattr(Machine, "wait", impatient)
    with pytest.raises(AssertionError):
        several()


def test_nobody_is_given_them_on_sm_100_unasked(monkeypatch) -> None:
    forward.stage_says(monkeypatch, why_not=None, fills=True)
    inputs = inputs_of(forward.case_of())
    plan = stage.make_plan(inputs)
    assert stage.pays(inputs, plan)
    monkeypatch.setattr(stage, "has_tensor_memory", lambda device: True)
    assert not stage.pays(inputs, plan)
    assert "no GPU has timed" in stage.place_in_order(inputs)
