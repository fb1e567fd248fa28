"""The registered operators of the gated norm, and of a sum and its norm: Triton kernels.

The plain forms are in `deltarule.nn.norm`, which chooses between the two.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.fused_kernels import kernel_operator
from deltarule.ops.registration import Rules

# A row is held whole in registers.
MAX_CHANNELS = 8192


class GatedNorm(NamedTuple):
    """y = weight * x / sqrt(mean(x^2) + eps) * activation(gate), contiguous and like x.

    x: [..., V], any strides.
    gate: Like x. None: no gate.
    weight: [V].
    eps: Added to the mean square.
    activation: "silu" or "sigmoid".
    zero_centered: Whether the weight is kept less one.
    """

    x: Tensor
    gate: Tensor | None
    weight: Tensor
    eps: float
    activation: str
    zero_centered: bool


rules = Rules(gradients=("x", "gate", "weight"))
gated_norm = kernel_operator(
    "gated_norm",
    GatedNorm,
    "fused.norms_triton",
    lambda given: (given.x.new_empty(given.x.shape),),
    rules,
)


class ResidualNorm(NamedTuple):
    """s = x + y, z = weight * s / sqrt(mean(s^2) + eps): contiguous, in the wider dtype of both.

    x: [..., V], any strides.
    y: Of the shape of x.
    weight: [V].
    eps: Added to the mean square.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    eps: float


def like_both(inputs: ResidualNorm) -> tuple[Tensor, Tensor]:
    x, dtype = inputs.x, torch.promote_types(inputs.x.dtype, inputs.y.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


rules = Rules(2, (0,), ("x", "weight"), alike={"y": "x"}, forgotten=("x", "y"))
residual_norm = kernel_operator(
    "residual_norm", ResidualNorm, "fused.norms_triton", like_both, rules, 2
)
