"""Hyena and multi-head Hyena against the authors' sums, and their filters against the paper's."""

import math

import torch
import torch.nn.functional as F

from deltarule.nn import Hyena, MultiHeadHyena
from nn.layers import inputs, make
from oracles import hyena
from tolerance import relative_rms

DOUBLE = torch.float64
T = 12


def projected(layer, x):
    """q, k and v [T, channels] after their convolutions, which nothing follows."""
    streams = []
    for name in "qkv":
        y = getattr(layer, f"{name}_proj")(x)
        weight = getattr(layer, f"{name}_conv").weight
        y = F.conv1d(F.pad(y.mT, (2, 0)), weight[:, None], groups=len(weight)).mT
        streams.append(y[0])
    return streams


def filters_by_hand(layer, size):
    """h_j = W_4 sin(w W_3 sin(w W_2 sin(w W_1 e(j / L)))) exp(-j / L |rate|), one lag at a time."""
    rows = []
    for lag in range(size):
        t = lag / layer.filter_size
        turns = [2 * math.pi * t * k for k in range(16)]
        x = [t, *map(math.cos, turns), *map(math.sin, turns)]
        x = torch.tensor(x, dtype=DOUBLE)
        for weight in (layer.filter_1, layer.filter_2, layer.filter_3):
            x = torch.sin(layer.frequency * (weight[:, :-1] @ x + weight[:, -1]))
        rows.append(layer.filter_4 @ x * torch.exp(-t * layer.rate.abs()))
    return torch.stack(rows)


@torch.no_grad()
def test_hyena_by_hand():
    layer, x = make("hyena", DOUBLE), inputs(1, T, DOUBLE)
    y = hyena.hyena(*projected(layer, x), filters_by_hand(layer, T), layer.D)
    assert relative_rms(layer(x)[0][0], layer.o_proj(y)) <= 1e-12


@torch.no_grad()
def test_multi_head_hyena_by_hand():
    layer, x = make("multi_head_hyena", DOUBLE), inputs(1, T, DOUBLE)
    q, k, v = (y.unflatten(1, (2, -1)) for y in projected(layer, x))
    taps = filters_by_hand(layer, T)
    heads = [hyena.multi_head(q[:, h], k[:, h], v[:, h], taps[:, h], layer.D[h]) for h in range(2)]
    expected = layer.o_proj(torch.cat(heads, dim=1))
    assert relative_rms(layer(x)[0][0], expected) <= 1e-12


@torch.no_grad()
def test_filters_end_where_they_are_said_to():
    layer, x = make("hyena", DOUBLE, filter_size=5, conv_size=0), inputs(1, T, DOUBLE)
    y = layer(x)[0]
    changed = x.clone()
    changed[:, 3] += 1
    assert torch.equal(layer(changed)[0][:, 8:], y[:, 8:])
    assert not torch.equal(layer(changed)[0][:, 7], y[:, 7])


def test_starting_values():
    layer = Hyena(32, num_heads=1)
    assert layer.filter_size == 2048
    assert layer.taps().shape == (32, 2048)
    # One hundredth is left after 0.3 to 1.5 of the length.
    assert torch.allclose(
        torch.exp(-layer.rate[[0, -1]] * torch.tensor([1.5, 0.3])), torch.tensor(0.01)
    )
    assert (layer.frequency == 14).all()
    assert MultiHeadHyena(32, num_heads=4).taps().shape == (4, 2048)
