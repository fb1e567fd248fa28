"""Rotations: of pairs of channels by their positions, and of complex numbers that a state turns.

(x_i, x_{i + D/2}) <- rotation by position * theta^(-2 i / D),   i = 0..D/2 - 1

A complex number is two channels, one in each half of an axis. Complex decays are real ones in a
frame that turns with the state:

h_t = a_t e^{i w_t} h_{t-1} + x_t  is, with Phi_t = w_1 + .. + w_t and g_t = e^{-i Phi_t} h_t,

    g_t = a_t g_{t-1} + e^{-i Phi_t} x_t
"""

import math

import torch
from torch import Tensor

WHOLE = 2 * math.pi


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """e^{i angle} x: x [..., 2 D] in halves, angle [..., D]."""
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def in_float64(x: Tensor) -> Tensor:
    """Use float64 where it exists: in float32 a sum of 1e6 angles keeps no digit below 0.06."""
    return x.float() if x.device.type == "mps" else x.double()


def within_a_turn(angle: Tensor, dtype: torch.dtype) -> Tensor:
    """Less whole turns, then in the given dtype."""
    return torch.remainder(angle, WHOLE).to(dtype)


def at_positions(positions: Tensor, frequency: Tensor) -> Tensor:
    """positions [B, T] * frequency [...], less whole turns: [B, T, ...] in frequency's dtype."""
    places = in_float64(positions).view(*positions.shape, *[1] * frequency.ndim)
    return within_a_turn(places * in_float64(frequency), frequency.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotate the channels of x [B, T, heads, D] by positions [B or 1, T]; i is paired with i + D/2.

    Angles are exact to 2e-7 up to positions of 1e9, whatever the dtype of x.

    Source: arXiv 2104.09864, eq. 34, with the two halves of the channels as the pairs.
    """
    dtype, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    of_device = angles_by_integers if x.device.type == "mps" else angles
    angle = of_device(positions, half, theta).to(dtype)
    return turned(x.to(dtype), angle.unsqueeze(2)).to(x.dtype)


def rotate_first(x: Tensor, channels: int, positions: Tensor, theta: float) -> Tensor:
    """Rotate the first channels of [B, T, heads, D], an even number of them, as `rotate` does."""
    if channels == x.shape[-1]:
        return rotate(x, positions, theta)
    first = rotate(x[..., :channels], positions, theta)
    return torch.cat([first, x[..., channels:]], dim=-1)


def angles(positions: Tensor, half: int, theta: float) -> Tensor:
    """[B, T, D/2] of positions [B, T], less whole turns, in float64."""
    exponent = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    return at_positions(positions, theta**-exponent)


def angles_by_integers(positions: Tensor, half: int, theta: float) -> Tensor:
    """The same angles without float64: integers in units of 2^-64 turns, modulo one turn."""
    turns = [int(theta ** (-i / half) / (2 * math.pi) * 2**64) for i in range(half)]
    steps = [(turn + 2**63) % 2**64 - 2**63 for turn in turns]
    # The overflow of the product drops the whole turns.
    turned = positions.to(torch.int64).unsqueeze(-1) * torch.tensor(steps, device=positions.device)
    return (turned >> 32).to(torch.float32) * (2 * math.pi / 2**32)
