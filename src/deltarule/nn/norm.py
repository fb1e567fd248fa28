"""Division by the root mean square of the channels, plain and with an output gate.

y = weight * x / sqrt(mean(x^2) + eps)
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.heads import split

Activation = Literal["silu", "sigmoid"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 for 16-bit inputs.

    Args:
        size: Channels.
        eps: Added to the mean square.

    Example:
        >>> RMSNorm(4)(torch.tensor([[2.0, 2.0, 2.0, 2.0]])).detach().round(decimals=4)
        tensor([[1., 1., 1., 1.]])
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        """Start with weights of one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(RMSNorm):
    """A norm over each head's channels, multiplied by an activated gate.

    y = RMSNorm(x) * activation(gate)

    Args:
        size: Channels of a head.
        eps: Added to the mean square.
        activation: What the gate goes through.
    """

    def __init__(self, size: int, eps: float = 1e-5, activation: Activation = "silu") -> None:
        """Start with weights of one."""
        super().__init__(size, eps)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise x [..., size]; with no gate, that is all."""
        y = super().forward(x)
        return y if gate is None else y * self.activation(gate)


class GroupRMSNorm(RMSNorm):
    """A norm over groups of channels, each channel with its own weight.

    Args:
        groups: Groups, each normalised on its own.
        size: Channels of all groups.
        eps: Added to the mean square.
    """

    def __init__(self, groups: int, size: int, eps: float = 1e-5) -> None:
        """Start with weights of one."""
        super().__init__(size, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        grouped = split(x, self.groups, x.shape[-1] // self.groups)
        y = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        return y * self.weight.to(x.dtype)
