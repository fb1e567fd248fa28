"""x / |x| for the rows of q and k, as a factor of each row.

y = x r        r = (sum x^2 + 1e-6)^(-1/2)        dx = r (dy - y (y.dy))
"""

import torch
from torch import Tensor

EPSILON = 1e-6


def unit_norm(x: Tensor) -> Tensor:
    """Rows [.., K] divided by their norm; a zero row stays zero."""
    return x * _factor(x)


def unit_norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient by x."""
    factor = _factor(x)
    y = x * factor
    return factor * (dy - y * (y * dy).sum(-1, keepdim=True))


def _factor(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (norm * norm + EPSILON).rsqrt_()
