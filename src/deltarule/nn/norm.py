"""Division by the root mean square of the channels, plain and with an output gate.

y = weight * x / sqrt(mean(x^2) + eps)

A norm of a sum gives the sum too, in the pass that makes it.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.layout import split
from deltarule.ops.dispatch import Implementation, Table, always, choose, why_not_fused
from deltarule.ops.fused import gated_norm as fused
from deltarule.ops.fused import residual_norm as fused_residual

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
        zero_centered: Keep weight - 1, which begins at zero, as Qwen3-Next does.

    Examples:
        >>> RMSNorm(4)(torch.tensor([[2.0, 2.0, 2.0, 2.0]])).detach().round(decimals=4)
        tensor([[1., 1., 1., 1.]])
    """

    def __init__(self, size: int, eps: float = 1e-5, zero_centered: bool = False) -> None:
        """Start with weights of one."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        call = Call(x, None, self.scale(), self.eps, "silu")
        return choose(GATED_NORMS, call, "auto", x.device).run(call)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y [..., size] and its norm."""
        call = Sum(x, y, self.scale(), self.eps)
        return choose(RESIDUAL_NORMS, call, "auto", x.device).run(call)

    def scale(self) -> Tensor:
        """What the normalised channels are multiplied by; beside 1, 16 bits would lose it."""
        if not self.zero_centered:
            return self.weight
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))


class LayerNorm(nn.LayerNorm):
    """Mean and variance of the last axis taken out, with a weight and a bias for each channel."""

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y [..., size] and its norm."""
        total = x + y
        return total, self(total)


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
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise x [..., size]; with no gate, that is all."""
        call = Call(x, gate, self.weight, self.eps, self.activation)
        return choose(GATED_NORMS, call, "auto", x.device).run(call)


class Call(NamedTuple):
    """What one gated norm is given."""

    x: Tensor
    gate: Tensor | None
    weight: Tensor
    eps: float
    activation: Activation


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), rounded once where the weight is the wider one."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


def run_torch(call: Call) -> Tensor:
    """Plain PyTorch."""
    x, gate, weight, eps, activation = call
    y = normalised(x, weight, eps)
    return y if gate is None else y * ACTIVATIONS[activation](gate)


def run_triton(call: Call) -> Tensor:
    """One kernel, which keeps the weight in float32 and rounds once."""
    return fused.gated_norm(*call)


def why_not_triton(call: Call) -> str | None:
    """What the Triton kernel cannot do."""
    x, gate, *_ = call
    if x.shape[-1] > fused.MAX_CHANNELS:
        return f"the Triton kernel takes up to {fused.MAX_CHANNELS} channels, got {x.shape[-1]}"
    if gate is not None and (gate.shape != x.shape or gate.dtype != x.dtype):
        return f"the Triton kernel takes a gate {list(x.shape)} in {x.dtype}, as x is"
    return why_not_fused(x)


# In the order in which they are preferred.
GATED_NORMS: Table[Call, Tensor] = {
    "triton": Implementation(why_not=why_not_triton, run=run_triton),
    "torch": Implementation(why_not=always, run=run_torch),
}


class Sum(NamedTuple):
    """What one norm of a sum is given."""

    x: Tensor
    y: Tensor
    weight: Tensor
    eps: float


def run_torch_sum(call: Sum) -> tuple[Tensor, Tensor]:
    """Plain PyTorch."""
    x, y, weight, eps = call
    total = x + y
    return total, normalised(total, weight, eps)


def run_triton_sum(call: Sum) -> tuple[Tensor, Tensor]:
    """One kernel; its backward adds the gradient by the sum to that through the norm."""
    total, y = fused_residual.residual_norm(*call)
    return total, y


def why_not_triton_sum(call: Sum) -> str | None:
    """What the Triton kernel cannot do."""
    x, y, *_ = call
    if x.shape[-1] > fused.MAX_CHANNELS:
        return f"the Triton kernel takes up to {fused.MAX_CHANNELS} channels, got {x.shape[-1]}"
    if y.shape != x.shape:
        return f"the Triton kernel takes y {list(x.shape)}, as x is"
    return why_not_fused(x) or why_not_fused(y)


# In the order in which they are preferred.
RESIDUAL_NORMS: Table[Sum, tuple[Tensor, Tensor]] = {
    "triton": Implementation(why_not=why_not_triton_sum, run=run_triton_sum),
    "torch": Implementation(why_not=always, run=run_torch_sum),
}


class GateOnly(nn.Module):
    """y = x * activation(gate): for outputs that are divided by a normaliser already."""

    def __init__(self, activation: Activation = "silu") -> None:
        """Nothing is learned."""
        super().__init__()
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Gate x; with no gate, leave it."""
        return x if gate is None else x * self.activation(gate)


class GatedGroupNorm(nn.GroupNorm):
    """Mean and variance of each head taken out, a weight and a bias a channel, then the gate.

    y = GroupNorm(x) * activation(gate)

    Args:
        heads: Heads, each a group.
        head_dim: Channels of a head.
        eps: Added to the variance.
        activation: What the gate goes through.
    """

    def __init__(
        self, heads: int, head_dim: int, eps: float, activation: Activation = "silu"
    ) -> None:
        """Start with weights of one and biases of zero."""
        super().__init__(heads, heads * head_dim, eps=eps)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise x [B, T, heads, head_dim]."""
        y = super().forward(x.flatten(0, 1).flatten(1)).view_as(x)
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
