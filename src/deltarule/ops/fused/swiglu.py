"""The registered operator of SwiGLU, and SwiGLU with the product after it.

The plain form is in `deltarule.nn.mlp`, which chooses between the two.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltarule.ops.dispatch import without_autocast
from deltarule.ops.operators import Operator
from deltarule.ops.registration import Gradients, Rules


class GatedProduct(NamedTuple):
    """h = SiLU(gate) * up, contiguous.

    gate: [..., D].
    up: Like gate.
    """

    gate: Tensor
    up: Tensor


def forward(inputs: GatedProduct) -> tuple[Tensor]:
    from deltarule.ops.fused import swiglu_triton as kernels

    return (kernels.swiglu(*inputs),)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: GatedProduct
) -> Gradients:
    from deltarule.ops.fused import swiglu_triton as kernels

    assert gradients[0] is not None
    return kernels.swiglu_backward(gradients[0], *inputs, None)


def fake(inputs: GatedProduct) -> tuple[Tensor]:
    return (inputs.gate.new_empty(inputs.gate.shape),)


swiglu = Operator(
    "swiglu", GatedProduct, forward, backward, fake, rules=Rules(gradients=("gate", "up"))
)


class SwiGLULinear(torch.autograd.Function):
    """y = h weight^T with h = SiLU(gate) * up, which the backward makes again beside d gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        """Project gate and up [..., D] by weight [O, D], all of one dtype: y [..., O]."""
        from deltarule.ops.fused import swiglu_triton as kernels

        ctx.save_for_backward(gate, up, weight)
        with without_autocast(gate.device):
            return F.linear(kernels.swiglu(gate, up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        from deltarule.ops.fused import swiglu_triton as kernels

        gate, up, weight = ctx.saved_tensors
        learns = ctx.needs_input_grad[2]
        d_h = d_y @ weight
        # Nobody reads dh later: h takes its place.
        d_gate, d_up = kernels.swiglu_backward(d_h, gate, up, d_h if learns else None, True)
        d_weight = d_y.flatten(0, -2).mT @ d_h.flatten(0, -2) if learns else None
        return d_gate, d_up, d_weight
