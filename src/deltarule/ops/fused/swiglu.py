"""The registered operator of SwiGLU, and SwiGLU with the product after it.

The plain form is in `deltarule.nn.mlp`, which chooses between the two.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltarule.ops.dispatch import without_autocast
from deltarule.ops.fused.registered import fused_operator
from deltarule.ops.registration import Rules


class GatedProduct(NamedTuple):
    """h = SiLU(gate) * up, contiguous.

    gate: [..., D].
    up: Like gate.
    """

    gate: Tensor
    up: Tensor


def like_gate(inputs: GatedProduct) -> tuple[Tensor]:
    return (inputs.gate.new_empty(inputs.gate.shape),)


rules = Rules(gradients=("gate", "up"))
swiglu = fused_operator("swiglu", GatedProduct, "swiglu_triton", like_gate, rules)


class SwiGLULinear(torch.autograd.Function):
    """y = h weight^T with h = SiLU(gate) * up, which the backward makes again beside d gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        """Project gate and up [..., D] by weight [O, D], all of one dtype: y [..., O]."""
        from deltarule.ops.fused import swiglu_triton as kernels

        ctx.save_for_backward(gate, up, weight)
        (h,) = kernels.swiglu(GatedProduct(gate, up))
        with without_autocast(gate.device):
            return F.linear(h, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        from deltarule.ops.fused import swiglu_triton as kernels

        gate, up, weight = ctx.saved_tensors
        learns = ctx.needs_input_grad[2]
        d_h = d_y @ weight
        # dh is not read again: h takes its place.
        d_gate, d_up = kernels.side_by_side(d_h, gate, up, d_h if learns else None)
        d_weight = d_y.flatten(0, -2).mT @ d_h.flatten(0, -2) if learns else None
        return d_gate, d_up, d_weight
