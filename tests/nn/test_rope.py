"""Rotary positions: a rotation, of which products see differences only."""

import math

import pytest
import torch

from deltarule.nn import State
from deltarule.nn.rotation import angles, angles_by_integers, rotate
from nn.layers import HIDDEN, make
from oracles import rotary
from tolerance import relative_rms


def test_turns_each_pair_by_its_own_angle():
    x = torch.zeros(1, 1, 1, 6, dtype=torch.float64)
    x[..., 1] = 1.0
    angle = 5 * 100.0 ** (-2 / 6)
    expected = torch.tensor([0, math.cos(angle), 0, 0, math.sin(angle), 0], dtype=torch.float64)
    assert relative_rms(rotate(x, torch.tensor([[5]]), 100.0)[0, 0, 0], expected) <= 1e-12


def test_products_depend_on_distance():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind()

    def product(at, other):
        return (rotate(q, torch.tensor([[at]])) * rotate(k, torch.tensor([[other]]))).sum()

    assert relative_rms(product(7, 3), product(104, 100)) <= 1e-12
    assert relative_rms(product(7, 3), product(7, 4)) > 1e-3


def test_bfloat16_tells_distant_neighbours_apart():
    x = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
    y = rotate(x, torch.tensor([[4000, 4001]]))
    assert not torch.equal(y[:, 0], y[:, 1])


@pytest.mark.parametrize("turned", [angles, angles_by_integers])
@pytest.mark.parametrize("position", [0, 5, 10**6, 10**9])
def test_angles_far_from_the_start(turned, position):
    expected = position * rotary.frequencies(16)
    found = turned(torch.tensor([[position]]), 8, 10000.0).double()
    assert ((found - expected + math.pi) % (2 * math.pi) - math.pi).abs().max() <= 4e-7


@pytest.mark.parametrize("shift", [10**6, 10**9])
def test_float32_rotates_as_float64_far_from_the_start(shift):
    x, positions = torch.randn(12, 16), torch.arange(12) + shift
    expected = rotary.rotate(x.double(), positions, rotary.frequencies(16))
    assert relative_rms(rotate(x[None, :, None], positions[None])[0, :, 0], expected) <= 5e-7


@pytest.mark.parametrize("shift", [10**6, 10**9])
@pytest.mark.parametrize("name", ["retnet", "sliding_window"])
def test_layers_do_not_see_a_shift(name, shift):
    layer, x = make(name).float(), torch.randn(2, 12, HIDDEN)
    state = layer.init_state(2)
    shifted = State(state, length=state["length"] + shift)
    with torch.no_grad():
        assert relative_rms(layer(x, shifted)[0], layer(x, state)[0].double()) <= 1e-6
