"""The cross entropy of rows of logits, and its gradient, which may take the place of the logits.

    loss = lse - logits[target], lse = log sum_j exp(logits_j)
    d logits_j = (exp(logits_j - lse) - [j = target]) d loss

Sums are taken in float32, whatever the dtype of the logits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.cross_entropy import CrossEntropy
from deltarule.ops.fused_kernels import adjacent
from deltarule.ops.registration import Backward, Gradients
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Elements of a row that a program holds at a time.
BLOCK = 4096
# Below any logit that counts, and finite: the difference of two is a number.
LEAST = tl.constexpr(-3.0e38)
OPTIONS = {"num_stages": 1, "num_warps": 8}


@triton.jit
def cross_entropy_kernel(logits, targets, losses, lse, V, s_row, ignore_index, BV: tl.constexpr):
    """One row, each lane with a maximum and a sum of its own until the end."""
    i_row = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BV)
    p = logits + i_row * s_row
    b_max, b_sum = tl.full([BV], LEAST, tl.float32), tl.zeros([BV], tl.float32)
    for start in range(0, V, BV):
        b_x = tl.load(p + start + o_v, mask=start + o_v < V, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_max, b_x)
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.exp(b_x - b_new)
        b_max = b_new
    largest = tl.max(b_max)
    b_lse = largest + tl.log(tl.sum(b_sum * tl.exp(b_max - largest)))
    target = tl.load(targets + i_row).to(tl.int64)
    # Targets are not checked on a GPU: one out of range makes its loss NaN.
    inside = (target >= 0) & (target < V)
    b_x = tl.load(p + target, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(losses + i_row, tl.where(target == ignore_index, 0.0, b_lse - b_x))
    tl.store(lse + i_row, b_lse)


@triton.jit
def cross_entropy_backward_kernel(
    d_losses, logits, targets, lse, d_logits, V, s_row, s_out, s_loss, ignore_index,
    BV: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    m = o_v < V
    target = tl.load(targets + i_row).to(tl.int64)
    scale = tl.load(d_losses + i_row * s_loss).to(tl.float32)
    b_x = tl.load(logits + i_row * s_row + o_v, mask=m, other=0.0).to(tl.float32)
    b_dx = (tl.exp(b_x - tl.load(lse + i_row)) - tl.where(o_v == target, 1.0, 0.0)) * scale
    b_dx = tl.where(target == ignore_index, 0.0, b_dx)
    tl.store(d_logits + i_row * s_out + o_v, b_dx.to(d_logits.dtype.element_ty), mask=m)


def cross_entropy(inputs: CrossEntropy) -> tuple[Tensor, Tensor]:
    """Losses [R] and log-sum-exp [R] in float32, of logits [R, V]."""
    logits = inputs.logits
    losses, lse = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    if len(logits):
        values = arguments(inputs) | {"losses": losses, "lse": lse}
        launch(cross_entropy_kernel, (len(logits), 1, 1), values)
    return losses, lse


def cross_entropy_backward(given: Backward[CrossEntropy]) -> Gradients:
    (d_losses,), (lse,), logits = given.gradients, given.saved, given.inputs.logits
    assert d_losses is not None
    into = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return (gradient_of_logits(d_losses, given.inputs, lse, into),)


def gradient_of_logits(d_losses: Tensor, inputs: CrossEntropy, lse: Tensor, into: Tensor) -> Tensor:
    """Write d logits [R, V] into a tensor, which may be the logits; d_losses [R] or [] (shared)."""
    if rows := len(inputs.logits):
        values = arguments(inputs) | {"lse": lse, "d_losses": d_losses}
        values |= {"d_logits": into, "s_out": into.stride(0)}
        values["s_loss"] = d_losses.stride(0) if d_losses.ndim else 0
        grid = rows, cdiv(values["V"], values["BV"]), 1
        launch(cross_entropy_backward_kernel, grid, values)
    return into


def arguments(inputs: CrossEntropy) -> dict[str, Any]:
    logits, size = adjacent(inputs.logits), inputs.logits.shape[1]
    values = {**OPTIONS, "logits": logits, "s_row": logits.stride(0), "V": size}
    values |= {"targets": inputs.targets.contiguous(), "ignore_index": inputs.ignore_index}
    return values | {"BV": min(BLOCK, power_of_2(size))}
