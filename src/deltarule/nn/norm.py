"""Division by the root mean square of the channels, plain and with an output gate.

y = weight * x / sqrt(mean(x^2) + eps)

A norm of a sum gives the sum too, in the pass that makes it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deltarule.nn import linears
from deltarule.nn.layout import split
from deltarule.nn.recomputed import LEAST
from deltarule.ops.dispatch import are_plain_eager, without_autocast
from deltarule.ops.fused import norms as fused
from deltarule.ops.fused_kernels import kernel_runs, why_not_fused
from deltarule.ops.operators import direct
from deltarule.ops.sequences import computed

Activation = Literal["silu", "sigmoid", "gelu"]
Slot = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": partial(F.gelu, approximate="tanh"),
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
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))
        self.eps, self.zero_centered = eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        return gated_norm(x, None, self.weight, self.eps, zero_centered=self.zero_centered)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y [..., size] and its norm; the kernel's backward adds the gradients."""
        weight = scale_of(self.weight, self.zero_centered)
        if kernel_runs(x, why_no_residual_norm(x, y)):
            total, normed = fused.residual_norm(x, y, weight, self.eps)
            return total, normed
        return plain_residual_norm(x, y, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """Mean and variance of the last axis taken out, with a weight and a bias for each channel."""

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, self(total)


class GatedRMSNorm(RMSNorm):
    """A norm over each head's channels, multiplied by an activated gate.

    y = RMSNorm(x) * activation(gate)
    """

    def __init__(self, size: int, eps: float = 1e-5, activation: Activation = "silu") -> None:
        super().__init__(size, eps)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return gated_norm(x, gate, self.weight, self.eps, self.activation)


def scale_of(weight: Tensor, zero_centered: bool) -> Tensor:
    """1 + weight in float32 at least, since beside 1 16 bits would lose it; or the weight."""
    return 1 + computed(weight) if zero_centered else weight


def gated_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: Activation = "silu",
    zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """weight * x / sqrt(mean(x^2) + eps) * activation(gate): one kernel, or plain PyTorch."""
    if kernel_runs(x, why_no_gated_norm(x, gate, activation)):
        # The weight is in float32 there, and y is rounded once.
        return fused.gated_norm(x, gate, weight, eps, activation, zero_centered)
    return plain_gated_norm(x, gate, weight, eps, activation, zero_centered)


def gated_norm_product(
    norm: nn.Module, x: Tensor, gate: Tensor | None, module: nn.Module,
    slot: Slot | None = None,
) -> Tensor | None:  # fmt: skip
    """A product with the norm of each head of x [..., H, V], as one node of autograd.

    None where the modules are more than that, or kernels do not run. `slot` gives the memory of the
    gradient by the gate [..., H * V].
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if type(norm) is not GatedRMSNorm or linears.is_hooked(norm):
        return None
    weight = norm.weight
    if x.shape[-1:] != weight.shape or why_no_gated_norm(x, gate, norm.activation):
        return None
    if not are_plain_eager((gate, weight)):
        return None
    # Nor where autocast rounds between the two.
    if (given := linears.in_one_node(x, [module])) is None or given[0] is not x:
        return None
    numbers = norm.eps, norm.activation, False
    y: Tensor = direct(NormedProduct)(x, gate, weight, given[1], slot, *numbers)
    return y


class NormedProduct(torch.autograd.Function):
    """y = W n with n = weight * x / sqrt(mean(x^2) + eps) * activation(gate) of all heads."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, matrix: Tensor,
        slot: Slot | None, *numbers: Any,
    ) -> Tensor:  # fmt: skip
        from deltarule.ops.fused import norms_triton as kernels

        (n,) = kernels.gated_norm(fused.GatedNorm(x, gate, weight, *numbers))
        ctx.numbers, ctx.slot, ctx.dtype = numbers, slot, matrix.dtype
        if matrix.dtype != x.dtype:
            (matrix,) = linears.rounded([matrix], [], x)
        # As `recomputed` has it.
        ctx.save_for_backward(x, gate, weight, matrix, n if n.nbytes < LEAST else None)
        with without_autocast(x.device):
            return F.linear(n.flatten(-2), matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from deltarule.ops.fused import norms_triton as kernels

        x, gate, weight, matrix, n = ctx.saved_tensors
        norm, d_rows = fused.GatedNorm(x, gate, weight, *ctx.numbers), d_y.flatten(0, -2)
        d_n, d_gate, d_matrix = (d_rows @ matrix).view(x.shape), None, None
        if gate is not None and ctx.slot is not None:
            d_gate = ctx.slot(gate.flatten(-2)).view(gate.shape)
        learns = ctx.needs_input_grad[3]
        # dn is not read again: n takes its place.
        remakes = learns and n is None
        d_x, made, d_weight = kernels.gated_norm_gradients(norm, d_n, d_gate, remakes)
        if learns:
            n = (d_n if remakes else n).view(-1, matrix.shape[1])
            same = ctx.dtype == n.dtype
            d_matrix = d_rows.mT @ n if same else linears.gradient_of_weight(d_rows, n, ctx.dtype)
        return d_x, made if d_gate is None else d_gate, d_weight, d_matrix, None, None, None, None


def norm_for_products(
    norm: nn.Module, x: Tensor, y: Tensor | None, modules: Sequence[nn.Module]
) -> tuple[Tensor, Tensor] | None:
    """x + y and its norm, which autocast would round for products with modules, rounded at once.

    None where the norm is more than that, kernels do not run, or nothing is rounded for a node of
    autograd that has all of the products.
    """
    dtype = rounds_to(x, modules)
    if dtype is None or type(norm) is not RMSNorm or linears.is_hooked(norm):
        return None
    if why_no_row(x) or not are_plain_eager((x, y, norm.weight)):
        return None
    if y is not None and why_no_residual_norm(x, y):
        return None
    weight = scale_of(norm.weight, norm.zero_centered)
    total, normed = direct(NormForProducts)(x, y, weight, norm.eps, dtype)
    return (x if y is None else total), normed


def rounds_to(x: Tensor, modules: Sequence[nn.Module]) -> torch.dtype | None:
    """To what autocast rounds x for products with all modules in training; None if it does not."""
    kind = x.device.type
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    if x.dtype != torch.float32 or x.is_meta or not torch.is_autocast_enabled(kind):
        return None
    weights = linears.plain_weights(modules)
    if not weights or len(weights) < len(modules) or not are_plain_eager(weights):
        return None
    return torch.get_autocast_dtype(kind)


class NormForProducts(torch.autograd.Function):
    """s = x + y and its norm in the dtype of the products that read it; s is None without y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        from deltarule.ops.fused import norms_triton as kernels

        ctx.set_materialize_grads(False)
        ctx.eps, ctx.of_y = eps, None if y is None else y.dtype
        if y is None:
            ctx.save_for_backward(x, weight)
            return None, *kernels.gated_norm(lone_norm(x, weight, eps), dtype)
        s, z = kernels.residual_norm(fused.ResidualNorm(x, y, weight, eps), dtype)
        ctx.save_for_backward(s, weight)
        return s, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_s: Tensor | None, d_z: Tensor | None) -> tuple[Tensor | None, ...]:
        from deltarule.ops.fused import norms_triton as kernels

        s, weight = ctx.saved_tensors
        if d_z is None:
            return d_s, d_s, None, None, None
        if ctx.of_y is None:
            d_x, _, d_weight = kernels.gated_norm_gradients(lone_norm(s, weight, ctx.eps), d_z)
            return d_x, None, d_weight, None, None
        inputs = fused.ResidualNorm(s, s, weight, ctx.eps)
        d_x, d_weight, d_y = kernels.residual_norm_gradients(inputs, d_s, d_z, s, ctx.of_y)
        return d_x, d_x if d_y is None else d_y, d_weight, None, None


def lone_norm(x: Tensor, weight: Tensor, eps: float) -> fused.GatedNorm:
    return fused.GatedNorm(x, None, weight, eps, "silu", False)


def plain_gated_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: Activation,
    zero_centered: bool,
) -> Tensor:  # fmt: skip
    weight = scale_of(weight, zero_centered)
    if gate is None:
        return normalised(x, weight, eps)
    y = normalised(computed(x), weight, eps) * ACTIVATIONS[activation](computed(gate))
    return y.to(x.dtype)


def why_no_gated_norm(x: Tensor, gate: Tensor | None, activation: Activation) -> str | None:
    if activation == "gelu":
        return "the Triton kernel has SiLU and sigmoid for the gate"
    if gate is not None and (gate.shape != x.shape or gate.dtype != x.dtype):
        return f"the Triton kernel takes a gate {list(x.shape)} in {x.dtype}, as x is"
    return why_no_row(x)


def plain_residual_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, normalised(total, weight, eps)


def why_no_residual_norm(x: Tensor, y: Tensor) -> str | None:
    if y.shape != x.shape:
        return f"the Triton kernel takes y {list(x.shape)}, as x is"
    return why_no_row(x) or why_not_fused(y)


def why_no_row(x: Tensor) -> str | None:
    if x.shape[-1] > fused.MAX_CHANNELS:
        return f"the Triton kernel takes up to {fused.MAX_CHANNELS} channels, got {x.shape[-1]}"
    return why_not_fused(x)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), rounded once where the weight is the wider one."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


class GateOnly(nn.Module):
    """y = x * activation(gate): for outputs that are divided by a normaliser already."""

    def __init__(self, activation: Activation = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x if gate is None else x * self.activation(gate)


class GatedGroupNorm(nn.GroupNorm):
    """Mean and variance of each head taken out, a weight and a bias a channel, then the gate.

    y = GroupNorm(x) * activation(gate)
    """

    def __init__(
        self, heads: int, head_dim: int, eps: float, activation: Activation = "silu"
    ) -> None:
        super().__init__(heads, heads * head_dim, eps=eps)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x.flatten(0, 1).flatten(1)).view_as(x)
        return y if gate is None else y * self.activation(gate)


class GroupRMSNorm(RMSNorm):
    """A norm over groups of the `size` channels, each channel with its own weight."""

    def __init__(self, groups: int, size: int, eps: float = 1e-5) -> None:
        super().__init__(size, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        grouped = split(x, self.groups, x.shape[-1] // self.groups)
        y = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        return y * self.weight.to(x.dtype)
