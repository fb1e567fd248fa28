"""The feed-forward half of a block.

y = down(SiLU(gate x) * up x)        or, without a gate, y = down(max(up x, 0)^2)
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.linears import is_plain, linear, linears
from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.fused import swiglu as fused
from deltarule.ops.fused_kernels import kernel_runs, why_not_fused
from deltarule.ops.operators import direct
from deltarule.shapes import Hidden

HiddenActivation = Literal["silu", "relu2"]


class SwiGLU(nn.Module):
    """A gated feed-forward network without biases.

    Args:
        hidden_size: Channels of the stream.
        mlp_size: Channels inside.
        gate_multiplier: What the gate is multiplied by before its SiLU.

    Examples:
        >>> import torch
        >>> SwiGLU(8, 16)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    Source: arXiv 2002.05202, eq. 6.
    """

    def __init__(self, hidden_size: int, mlp_size: int, gate_multiplier: float = 1.0) -> None:
        super().__init__()
        self.gate_multiplier = gate_multiplier
        self.gate_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        """Map x [B, T, hidden_size] token by token."""
        gate, up = linears(x, tuple(self.of_input().values()))
        if self.gate_multiplier != 1:
            gate = gate * self.gate_multiplier
        if kernel_runs(gate, why_not_gated(gate, up)):
            return gated_product(gate, up, self.down_proj)
        y: Hidden = self.down_proj(F.silu(gate) * up)
        return y

    def of_input(self) -> dict[str, nn.Module]:
        """What is applied to x itself, by the name of its result."""
        return {"gate": self.gate_proj, "up": self.up_proj}


class SquaredReLU(nn.Module):
    """A feed-forward network without gate and biases: y = down(max(up x, 0)^2).

    Args:
        hidden_size: Channels of the stream.
        mlp_size: Channels inside.

    Examples:
        >>> import torch
        >>> SquaredReLU(8, 16)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    Source: arXiv 2109.08668, section 3.1.
    """

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        """Map x [B, T, hidden_size] token by token."""
        return linear(F.relu(linear(x, self.up_proj)).square(), self.down_proj)


def make_mlp(
    hidden_size: int, mlp_size: int, activation: HiddenActivation, gate_multiplier: float = 1.0
) -> nn.Module:
    if activation == "relu2":
        return SquaredReLU(hidden_size, mlp_size)
    return SwiGLU(hidden_size, mlp_size, gate_multiplier)


def gated_product(gate: Tensor, up: Tensor, down: nn.Linear) -> Hidden:
    """down(SiLU(gate) * up): one kernel before the product, and one in the backward.

    The backward needs gate and up alone.
    """
    y: Hidden
    if not torch.is_grad_enabled():
        y = linear(fused.swiglu(gate, up), down)
    elif not is_plain(down) or not are_plain_eager((gate, up, down.weight)):
        y = down(fused.swiglu(gate, up))
    else:
        autocast = torch.is_autocast_enabled(gate.device.type)
        weight = down.weight.to(gate.dtype) if autocast else down.weight
        y = direct(fused.SwiGLULinear)(gate, up, weight)
    return y


def why_not_gated(gate: Tensor, up: Tensor) -> str | None:
    if gate.dtype != up.dtype:
        return f"the Triton kernel takes up in {gate.dtype}, as gate is"
    return why_not_fused(gate)
