"""The feed-forward half of a block.

y = down(SiLU(gate x) * up x)        or, without a gate, y = down(max(up x, 0)^2)
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deltarule.nn import few_rows, linears
from deltarule.ops.dispatch import without_autocast
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
        gate_multiplier: Factor of the gate before its SiLU.

    Examples:
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
        return swiglu(x, (*self.of_input().values(), self.down_proj), self.gate_multiplier)

    def of_input(self) -> dict[str, nn.Module]:
        return {"gate": self.gate_proj, "up": self.up_proj}


def swiglu(x: Tensor, modules: Sequence[nn.Module], factor: float = 1.0) -> Tensor:
    """down(SiLU(factor * gate x) * up x) of the modules gate, up and down."""
    given = linears.in_one_node(x, modules)
    if given is not None and why_not_fused(x) is None:
        y: Tensor = direct(GatedProducts)(*given, factor)
        return y
    eager = x.is_cuda and not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    if eager and factor == 1:
        h = few_rows.gated_product(x, linears.plain_weights(modules[:2]))
        if h is not None:
            return linears.linear(h, modules[2])
    gate, up = linears.linears(x, modules[:2])
    return linears.linear(gated_product(gate if factor == 1 else gate * factor, up), modules[2])


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up: one kernel, or plain PyTorch."""
    fits = kernel_runs(gate, why_not_gated(gate, up))
    return fused.swiglu(gate, up) if fits else F.silu(gate) * up


class SquaredReLU(nn.Module):
    """A feed-forward network without gate and biases: y = down(max(up x, 0)^2).

    Args:
        hidden_size: Channels of the stream.
        mlp_size: Channels inside.

    Examples:
        >>> SquaredReLU(8, 16)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    Source: arXiv 2109.08668, section 3.1.
    """

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        return linears.linear(F.relu(linears.linear(x, self.up_proj)).square(), self.down_proj)


def make_mlp(
    hidden_size: int, mlp_size: int, activation: HiddenActivation, gate_multiplier: float = 1.0
) -> nn.Module:
    if activation == "relu2":
        return SquaredReLU(hidden_size, mlp_size)
    return SwiGLU(hidden_size, mlp_size, gate_multiplier)


class GatedProducts(torch.autograd.Function):
    """y = W_down h with h = SiLU(W_gate x) * W_up x, which the backward makes again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down: Tensor, factor: float
    ) -> Tensor:
        from deltarule.ops.fused import swiglu_triton as kernels

        weights = gate_weight, up_weight
        ctx.groups, (*wholes, matrix), both = linears.products_of(x.flatten(0, -2), weights, down)
        if factor != 1:
            both[0].mul_(factor)
        (h,) = kernels.swiglu_rows(fused.GatedProduct(*both))
        ctx.factor, ctx.dtype = factor, down.dtype
        ctx.save_for_backward(x, matrix, *both, *wholes)
        with without_autocast(x.device):
            return F.linear(h, matrix).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from deltarule.ops.fused import swiglu_triton as kernels

        x, down, *both = ctx.saved_tensors
        both, wholes = fused.GatedProduct(*both[:2]), both[2:]
        learns, d_rows = ctx.needs_input_grad[3], d_y.flatten(0, -2)
        d_h = d_rows @ down
        # dh is not read again: h takes its place.
        (d_both,) = kernels.swiglu_gradients(both, d_h, d_h if learns else None, True)
        d_parts = d_both.split(down.shape[1], -1)
        if ctx.factor != 1:
            d_parts[0].mul_(ctx.factor)
        needed, same = ctx.needs_input_grad[:3], ctx.dtype == d_h.dtype
        found = linears.products_back(x, ctx.groups, wholes, d_parts, needed, ctx.dtype, d_both)
        if not learns:
            return *found, None, None
        if same:
            return *found, d_rows.mT @ d_h, None
        return *found, linears.gradient_of_weight(d_rows, d_h, ctx.dtype), None


def why_not_gated(gate: Tensor, up: Tensor) -> str | None:
    if gate.dtype != up.dtype:
        return f"the Triton kernel takes up in {gate.dtype}, as gate is"
    return why_not_fused(gate)
