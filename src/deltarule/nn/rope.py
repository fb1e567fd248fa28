"""Rotary positions: each pair of channels turns by an angle proportional to the position.

(x_i, x_{i + D/2}) <- rotation by position * theta^(-2 i / D),   i = 0..D/2 - 1
"""

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotate the channels of x by their positions; channel i is paired with i + D/2.

    Args:
        x: [B, T, heads, D], D even.
        positions: [B or 1, T] counted from 0 in each sequence.
        theta: Base of the wavelengths.

    Returns:
        The rotated x, in its dtype.

    Source: arXiv 2104.09864, eq. 34, with the two halves of the channels as the pairs.
    """
    # Angles in float32 at least: bfloat16 cannot tell neighbouring positions apart beyond 256.
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=dtype, device=x.device) / half
    angles = positions.unsqueeze(-1).to(dtype) * theta**-exponent
    cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)
    first, second = x.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
