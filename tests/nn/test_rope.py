"""Rotary positions: a rotation, of which products see differences only."""

import math

import torch

from deltarule.nn.rope import rotate
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
