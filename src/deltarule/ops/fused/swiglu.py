"""The registered operator of SwiGLU, its backward operator, and SwiGLU with the product after it.

The plain form is in `deltarule.nn.mlp`, which chooses between the two.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltarule.ops.eager import no_second_derivative


@torch.library.custom_op("deltarule::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """h = SiLU(gate) * up, by a Triton kernel.

    Args:
        gate: [..., D].
        up: Like gate.

    Returns:
        h like gate, contiguous.
    """
    from deltarule.ops.fused import swiglu_triton as kernels

    return kernels.swiglu(gate, up)


@torch.library.custom_op("deltarule::swiglu_backward", mutates_args=())
def swiglu_backward(d_h: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by gate and up."""
    from deltarule.ops.fused import swiglu_triton as kernels

    return kernels.swiglu_backward(d_h, gate, up, None)


class SwiGLULinear(torch.autograd.Function):
    """y = h weight^T with h = SiLU(gate) * up, which the backward makes again beside d gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        """Project gate and up [..., D] by weight [O, D], all of one dtype: y [..., O]."""
        from deltarule.ops.fused import swiglu_triton as kernels

        ctx.save_for_backward(gate, up, weight)
        with torch.autocast(gate.device.type, enabled=False):
            return F.linear(kernels.swiglu(gate, up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients by gate, up and weight."""
        from deltarule.ops.fused import swiglu_triton as kernels

        gate, up, weight = ctx.saved_tensors
        learns = ctx.needs_input_grad[2]
        d_h = d_y @ weight
        # Nobody reads dh later: h takes its place.
        d_gate, d_up = kernels.swiglu_backward(d_h, gate, up, d_h if learns else None)
        d_weight = d_y.flatten(0, -2).mT @ d_h.flatten(0, -2) if learns else None
        return d_gate, d_up, d_weight


@swiglu.register_fake
def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@swiglu_backward.register_fake
def _backward_fake(d_h: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_h: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = swiglu_backward(d_h, *ctx.saved_tensors)
    return d_gate, d_up


swiglu.register_autograd(_backward, setup_context=_setup_context)
swiglu_backward.register_autograd(no_second_derivative)
