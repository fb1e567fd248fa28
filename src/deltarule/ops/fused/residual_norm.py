"""The registered operator of a sum and its norm, and its backward operator: Triton kernels.

The plain form is in `deltarule.nn.norm`, which chooses between the two.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.eager import no_second_derivative


@torch.library.custom_op("deltarule::residual_norm", mutates_args=())
def residual_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = x + y, z = weight * s / sqrt(mean(s^2) + eps).

    Args:
        x: [..., V], any strides.
        y: Of the shape of x.
        weight: [V].
        eps: Added to the mean square.

    Returns:
        s and z, contiguous, in the wider dtype of x and y.
    """
    from deltarule.ops.fused import norms_triton as kernels

    s, z = kernels.residual_norm(as_rows(x), as_rows(y), weight, eps)
    return s.view(x.shape), z.view(x.shape)


@torch.library.custom_op("deltarule::residual_norm_backward", mutates_args=())
def residual_norm_backward(
    d_s: Tensor | None, d_z: Tensor, s: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient by x, which is that by y, and by weight."""
    from deltarule.ops.fused import norms_triton as kernels

    d_sum = None if d_s is None else as_rows(d_s)
    d_x, d_weight = kernels.residual_norm_backward(d_sum, as_rows(d_z), as_rows(s), weight, eps)
    return d_x.view(s.shape), d_weight


def as_rows(x: Tensor) -> Tensor:
    """[..., V] -> [M, V]: a view wherever the leading axes follow each other."""
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])


@residual_norm.register_fake
def _fake(x: Tensor, y: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


@residual_norm_backward.register_fake
def _backward_fake(
    d_s: Tensor | None, d_z: Tensor, s: Tensor, weight: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    x, y, weight, ctx.eps = inputs
    ctx.dtypes = x.dtype, y.dtype
    ctx.save_for_backward(output[0], weight)


def _backward(ctx: Any, d_s: Tensor | None, d_z: Tensor | None) -> tuple[Any, ...]:
    s, weight = ctx.saved_tensors
    d_weight = None
    if d_z is None:
        d_x = d_s
    else:
        d_x, d_weight = residual_norm_backward(d_s, d_z, s, weight, ctx.eps)
    d_x, d_y = (None if d_x is None else d_x.to(dtype) for dtype in ctx.dtypes)
    return d_x, d_y, d_weight, None


residual_norm.register_autograd(_backward, setup_context=_setup_context)
residual_norm_backward.register_autograd(no_second_derivative)
