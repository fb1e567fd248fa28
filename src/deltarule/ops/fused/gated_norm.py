"""The registered operator of the gated norm, and its backward operator: Triton kernels.

The plain form is in `deltarule.nn.norm`, which chooses between the two.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.eager import no_second_derivative

# A row is held whole in registers.
MAX_CHANNELS = 8192


@torch.library.custom_op("deltarule::gated_norm", mutates_args=())
def gated_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str
) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps) * activation(gate).

    Args:
        x: [..., V], any strides.
        gate: Like x. None: no gate.
        weight: [V].
        eps: Added to the mean square.
        activation: "silu" or "sigmoid".

    Returns:
        y like x, contiguous.
    """
    from deltarule.ops.fused import norms_triton as kernels

    gate_rows = None if gate is None else as_rows(gate)
    return kernels.gated_norm(as_rows(x), gate_rows, weight, eps, activation).view(x.shape)


@torch.library.custom_op("deltarule::gated_norm_backward", mutates_args=())
def gated_norm_backward(
    d_y: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, gate (empty without one) and weight."""
    from deltarule.ops.fused import norms_triton as kernels

    gate_rows = None if gate is None else as_rows(gate)
    d_x, d_gate, d_weight = kernels.gated_norm_backward(
        as_rows(d_y), as_rows(x), gate_rows, weight, eps, activation
    )
    empty = x.new_empty(0) if d_gate is None else d_gate.view(x.shape)
    return d_x.view(x.shape), empty, d_weight


def as_rows(x: Tensor) -> Tensor:
    """[..., H, V] -> [M, H, V], [B, T, V] -> [M, 1, V]: a view wherever the leading axes allow."""
    return x.reshape(-1, x.shape[-2] if x.ndim > 3 else 1, x.shape[-1]) if x.numel() else (
        x.new_empty(0, 1, x.shape[-1])
    )  # fmt: skip


@gated_norm.register_fake
def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@gated_norm_backward.register_fake
def _backward_fake(
    d_y: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    d_gate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), d_gate, weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    x, gate, weight = ctx.saved_tensors
    d_x, d_gate, d_weight = gated_norm_backward(d_y, x, gate, weight, *ctx.options)
    return d_x, None if gate is None else d_gate, d_weight, None, None


gated_norm.register_autograd(_backward, setup_context=_setup_context)
gated_norm_backward.register_autograd(no_second_derivative)
