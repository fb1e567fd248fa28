"""The registered operator of a sum and its norm: Triton kernels.

The plain form is in `deltarule.nn.norm`, which chooses between the two.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.operators import Operator
from deltarule.ops.registration import Gradients, Rules


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


def forward(inputs: ResidualNorm) -> tuple[Tensor, Tensor]:
    from deltarule.ops.fused import norms_triton as kernels

    return kernels.residual_norm(inputs)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: ResidualNorm
) -> Gradients:
    """The gradient by x, which is that by y, and by weight, from s alone."""
    from deltarule.ops.fused import norms_triton as kernels

    (d_s, d_z), (s,) = gradients, saved
    if d_z is None:
        assert d_s is not None
        return d_s.clone(), torch.zeros_like(inputs.weight)
    return kernels.residual_norm_backward(d_s, d_z, s, inputs)


def fake(inputs: ResidualNorm) -> tuple[Tensor, Tensor]:
    x, dtype = inputs.x, torch.promote_types(inputs.x.dtype, inputs.y.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


rules = Rules(2, (0,), ("x", "weight"), alike={"y": "x"}, forgotten=("x", "y"))
residual_norm = Operator(
    "residual_norm", ResidualNorm, forward, backward, fake, returned=2, rules=rules
)
