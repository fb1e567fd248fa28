"""Products of a few rows without gradients, for which a GPU has kernels that read W at its speed.

y = x W^T        h = SiLU(x W_gate^T) * x W_up^T
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.fused_kernels import is_hopper, why_not_fused

# With 64, cuBLAS is faster.
MOST_ROWS = 32


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, [..., O] of x [..., I] and W [O, I]."""
    if not (rows := kernel_rows(x, weight)):
        return F.linear(x, weight)
    if rows > 1:
        return several(x, weight)
    # Triton is an extra, imported where it runs.
    from deltarule.ops.fused.one_row_triton import one_row

    return one_row(x.view(-1), weight).view(*x.shape[:-1], -1)


def gated_product(x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """SiLU(gate) * up by the kernel that multiplies with both weights, or None."""
    whole = as_one(weights) if len(weights) == 2 else None
    return None if whole is None or kernel_rows(x, whole) < 2 else several(x, whole, gated=True)


def several(x: Tensor, weight: Tensor, gated: bool = False, within: Any = None) -> Tensor:
    from deltarule.ops.fused.few_rows_gluon import few_rows

    return few_rows(x.view(-1, x.shape[-1]), weight, gated, within).view(*x.shape[:-1], -1)


def kernel_rows(x: Tensor, *weights: Tensor) -> int:
    """Rows of x [..., I] that a kernel multiplies with the weights, or 0.

    One row takes any GPU as long as its weights do. More are multiplied by cuBLAS but on Hopper.
    """
    size = x.shape[-1]
    # First what rules out every product of a step on a CPU.
    if not x.is_cuda or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return 0
    if not 0 < x.numel() <= MOST_ROWS * size:
        return 0
    alike = all(x.dtype == weight.dtype and weight.is_contiguous() for weight in weights)
    if not alike or not x.is_contiguous() or torch.is_autocast_enabled("cuda"):
        return 0
    rows = x.numel() // size
    if rows > 1 and (x.dtype.itemsize != 2 or size % 8 or not is_hopper(x.device)):
        return 0
    if rows > 1 and any(tensor.data_ptr() % 16 for tensor in (x, *weights)):
        return 0
    return rows if why_not_fused(x) is None and are_plain_eager((x, *weights)) else 0


def as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """The matrix [sum of O, I] that weights laid end to end are; None where they are not."""
    place, rows = weights[0].data_ptr(), 0
    for weight in weights:
        if weight.data_ptr() != place or not weight.is_contiguous():
            return None
        place += weight.nbytes
        rows += weight.shape[0]
    if weights[0].untyped_storage().data_ptr() != weights[-1].untyped_storage().data_ptr():
        return None
    channels = weights[0].shape[1]
    return weights[0].as_strided((rows, channels), (channels, 1))
