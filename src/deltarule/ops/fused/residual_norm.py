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

    x, y, weight, eps = inputs
    s, z = kernels.residual_norm(as_rows(x), as_rows(y), weight, eps)
    return s.view(x.shape), z.view(x.shape)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: ResidualNorm
) -> Gradients:
    """The gradient by x, which is that by y, and by weight, from s alone."""
    from deltarule.ops.fused import norms_triton as kernels

    (d_s, d_z), (s,) = gradients, saved
    if d_z is None:
        assert d_s is not None
        return d_s.clone(), torch.zeros_like(inputs.weight)
    d_sum = None if d_s is None else as_rows(d_s)
    d_x, d_weight = kernels.residual_norm_backward(
        d_sum, as_rows(d_z), as_rows(s), inputs.weight, inputs.eps
    )
    return d_x.view(s.shape), d_weight


def fake(inputs: ResidualNorm) -> tuple[Tensor, Tensor]:
    x, dtype = inputs.x, torch.promote_types(inputs.x.dtype, inputs.y.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


def as_rows(x: Tensor) -> Tensor:
    """[..., V] -> [M, V]: a view wherever the leading axes follow each other."""
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])


residual_norm = Operator(
    "residual_norm", ResidualNorm, forward, backward, fake, returned=2,
    rules=Rules(2, (0,), ("x", "weight"), alike={"y": "x"}, forgotten=("x", "y")),
)  # fmt: skip
