"""Complex decays as real ones, in a frame that turns with the state.

h_t = a_t e^{i w_t} h_{t-1} + x_t  is, with Phi_t = w_1 + .. + w_t and g_t = e^{-i Phi_t} h_t,

    g_t = a_t g_{t-1} + e^{-i Phi_t} x_t

A complex number is two channels, one in each half of an axis, as rotary positions have them.
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


def exact(x: Tensor) -> Tensor:
    """In float64 where the device has it: a sum of 1e6 angles keeps no digit below 0.06 without."""
    return x.float() if x.device.type == "mps" else x.double()


def within_a_turn(angle: Tensor, dtype: torch.dtype) -> Tensor:
    """Less whole turns, then in the given dtype."""
    return torch.remainder(angle, WHOLE).to(dtype)


def at_positions(positions: Tensor, frequency: Tensor) -> Tensor:
    """positions [B, T] * frequency [...], less whole turns: [B, T, ...] in frequency's dtype."""
    places = exact(positions).view(*positions.shape, *[1] * frequency.ndim)
    return within_a_turn(places * exact(frequency), frequency.dtype)
