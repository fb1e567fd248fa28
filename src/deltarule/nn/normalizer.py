"""The normaliser z as one more value channel: it is written with ones and read like the others.

S' = [S; z^T]        w' = [v; 1]        S' q = [S q; z^T q]
"""

import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.gates import computed

# Where no feature of a query is among those of the keys, nothing is read and nothing divides.
SMALLEST = 1e-6


def with_one(v: Tensor) -> Tensor:
    """[v; 1]: the values and the channel that the normaliser sums in."""
    return F.pad(v, (0, 1), value=1.0)


def divided(o: Tensor, least: Tensor | float = SMALLEST, more: float = 0.0) -> Tensor:
    """S q / (max(z^T q, least) + more)."""
    read, z = computed(o[..., :-1]), computed(o[..., -1:])
    return (read / (z.clamp(min=least) + more)).to(o.dtype)
