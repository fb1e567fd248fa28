"""The registered operators of the cross entropy: of logits, and of a head that never holds them.

The second computes its gradients on the way, a few rows at a time, and keeps only those.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.dispatch import without_autocast
from deltarule.ops.fused_kernels import kernel_operator
from deltarule.ops.operators import Operator
from deltarule.ops.registration import Backward, Gradients, Rules

# Logits held at a time by the linear form: 256 MiB in bfloat16.
MOST_LOGITS = 2**27


class CrossEntropy(NamedTuple):
    """loss = lse - logits[target], [R] in float32, by a Triton kernel.

    logits: [R, V].
    targets: Integers [R] in [0, V), or ignore_index: a loss of 0.
    ignore_index: The target of rows that do not count.
    """

    logits: Tensor
    targets: Tensor
    ignore_index: int


def fake(inputs: CrossEntropy) -> tuple[Tensor, Tensor]:
    logits, targets, _ = inputs
    losses, lse = (logits.new_empty(targets.shape, dtype=torch.float32) for _ in range(2))
    return losses, lse


class LinearCrossEntropy(NamedTuple):
    """The mean cross entropy of x weight^T over the rows that count, a few rows at a time.

    x: [R, D].
    weight: [V, D].
    targets: Integers [R] in [0, V), or ignore_index.
    ignore_index: The target of rows that do not count.
    dtype: In which the products are taken.
    with_gradient: Whether a backward may follow.
    triton: Whether the Triton kernels run, or plain PyTorch.
    """

    x: Tensor
    weight: Tensor
    targets: Tensor
    ignore_index: int
    dtype: torch.dtype
    with_gradient: bool
    triton: bool


def linear_forward(inputs: LinearCrossEntropy) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, its gradients by x and weight as if it were the sum, and one over the rows.

    Gradients are empty without with_gradient; a share of the sum would be too small for float16.
    """
    x, weight, targets, ignore_index, dtype, with_gradient, triton = inputs
    wide = torch.promote_types(dtype, torch.float32)
    share = 1 / (targets != ignore_index).sum().clamp(min=1).to(wide)
    rows = max(MOST_LOGITS // weight.shape[0], 1)
    cast = weight.to(dtype)
    loss = torch.zeros_like(share)
    d_x = torch.empty(x.shape if with_gradient else 0, dtype=x.dtype, device=x.device)
    d_weight = torch.empty(0, dtype=wide, device=x.device)
    evaluate = _evaluate_triton if triton else _evaluate_torch
    with without_autocast(x.device):
        for part in (slice(start, start + rows) for start in range(0, len(x), rows)):
            given = x[part].to(dtype)
            losses, d_logits = evaluate(given @ cast.mT, targets[part], ignore_index, with_gradient)
            loss += losses.sum()
            if with_gradient:
                d_x[part] = d_logits @ cast
                d_weight = plus_product(d_weight, d_logits.mT, given)
    if with_gradient and not d_weight.numel():
        d_weight = d_weight.new_zeros(weight.shape)
    return loss * share, d_x, d_weight.to(weight.dtype), share


def plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a b in total's dtype, in its place; an empty total is none."""
    if not a.is_cuda or a.dtype == total.dtype or torch._C._are_functorch_transforms_active():
        return total.add_(a @ b) if total.numel() else (a @ b).to(total.dtype)
    # The product itself is not rounded to 16 bits, nor written twice.
    if not total.numel():
        return torch.mm(a, b, out_dtype=total.dtype)
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _evaluate_triton(
    logits: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses, and where wanted the gradient of their sum in the place of the logits."""
    from deltarule.ops.fused import cross_entropy_triton as kernels

    call = CrossEntropy(logits, targets, ignore_index)
    losses, lse = kernels.cross_entropy(call)
    if with_gradient:
        one = torch.ones((), device=logits.device)
        kernels.gradient_of_logits(one, call, lse, logits)
    return losses, logits


def _evaluate_torch(
    logits: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    counts = (targets != ignore_index).unsqueeze(1)
    column = targets.long().unsqueeze(1).where(counts, 0)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    losses = -log_p.gather(1, column).where(counts, 0).squeeze(1)
    if with_gradient:
        minus_one = -torch.ones_like(column, dtype=log_p.dtype)
        errors = log_p.exp_().scatter_add_(1, column, minus_one)
        logits = errors.where(counts, 0).to(logits.dtype)
    return losses, logits


def linear_backward(given: Backward[LinearCrossEntropy]) -> Gradients:
    assert given.inputs.with_gradient
    (d_loss,), (d_x, d_weight, share) = given.gradients, given.saved
    assert d_loss is not None
    scale = d_loss * share
    return d_x * scale.to(d_x.dtype), d_weight * scale.to(d_weight.dtype)


def linear_fake(inputs: LinearCrossEntropy) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, wide = inputs.x, inputs.weight, torch.promote_types(inputs.dtype, torch.float32)
    loss, share = (x.new_empty((), dtype=wide) for _ in range(2))
    d_x, d_weight = (t.new_empty(t.shape if inputs.with_gradient else 0) for t in (x, weight))
    return loss, d_x, d_weight, share


rules = Rules(1, (1,), ("logits",))
cross_entropy = kernel_operator(
    "cross_entropy", CrossEntropy, "fused.cross_entropy_triton", fake, rules, 2
)
of_head = LinearCrossEntropy, linear_forward, linear_backward, linear_fake
rules = Rules(1, (1, 2, 3), ("x", "weight"), forgotten=("targets",))
linear_cross_entropy = Operator("linear_cross_entropy", *of_head, returned=4, rules=rules)
