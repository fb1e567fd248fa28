"""The registered operators of the cross entropy: of logits, and of a head that never holds them.

The second computes its gradients on the way, a few rows at a time, and keeps only those.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.eager import no_second_derivative

# Logits held at a time by the linear form: 256 MiB in bfloat16.
MOST_LOGITS = 2**27


@torch.library.custom_op("deltarule::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """loss = lse - logits[target], by a Triton kernel.

    Args:
        logits: [R, V].
        targets: Integers [R] in [0, V), or ignore_index: a loss of 0.
        ignore_index: The target of rows that do not count.

    Returns:
        Losses [R] and lse [R], both float32.
    """
    from deltarule.ops.fused import cross_entropy_triton as kernels

    return kernels.cross_entropy(logits, targets, ignore_index)


@torch.library.custom_op("deltarule::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    d_losses: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int
) -> Tensor:
    """The gradient by logits."""
    from deltarule.ops.fused import cross_entropy_triton as kernels

    into = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return kernels.cross_entropy_backward(d_losses, logits, targets, lse, ignore_index, into)


@torch.library.custom_op("deltarule::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    with_gradient: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean cross entropy of x weight^T over the rows that count, a few rows at a time.

    Args:
        x: [R, D].
        weight: [V, D].
        targets: Integers [R] in [0, V), or ignore_index.
        ignore_index: The target of rows that do not count.
        dtype: In which the products are taken.
        with_gradient: Whether a backward may follow.
        triton: Whether the Triton kernels run, or plain PyTorch.

    Returns:
        The loss, its gradients by x and weight as if it were the sum (empty without
        with_gradient), and one over the rows that count. A share of the sum would be too small
        for float16.
    """
    wide = torch.promote_types(dtype, torch.float32)
    share = 1 / (targets != ignore_index).sum().clamp(min=1).to(wide)
    rows = max(MOST_LOGITS // weight.shape[0], 1)
    cast = weight.to(dtype)
    loss = torch.zeros_like(share)
    d_x = torch.empty(x.shape if with_gradient else 0, dtype=x.dtype, device=x.device)
    d_weight = torch.zeros(weight.shape if with_gradient else 0, dtype=wide, device=x.device)
    evaluate = _evaluate_triton if triton else _evaluate_torch
    with torch.autocast(x.device.type, enabled=False):
        for part in (slice(start, start + rows) for start in range(0, len(x), rows)):
            given = x[part].to(dtype)
            losses, d_logits = evaluate(given @ cast.mT, targets[part], ignore_index, with_gradient)
            loss += losses.sum()
            if with_gradient:
                d_x[part] = d_logits @ cast
                d_weight += d_logits.mT @ given
    return loss * share, d_x, d_weight.to(weight.dtype), share


def _evaluate_triton(
    logits: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses, and where wanted the gradient of their sum in the place of the logits."""
    from deltarule.ops.fused import cross_entropy_triton as kernels

    losses, lse = kernels.cross_entropy(logits, targets, ignore_index)
    if with_gradient:
        one = torch.ones((), device=logits.device)
        kernels.cross_entropy_backward(one, logits, targets, lse, ignore_index, logits)
    return losses, logits


def _evaluate_torch(
    logits: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    counts = (targets != ignore_index).unsqueeze(1)
    column = targets.long().unsqueeze(1).where(counts, 0)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    losses = -log_p.gather(1, column).where(counts, 0).squeeze(1)
    if with_gradient:
        minus_one = -torch.ones_like(column, dtype=log_p.dtype)
        errors = log_p.exp_().scatter_add_(1, column, minus_one)
        logits = errors.where(counts, 0).to(logits.dtype)
    return losses, logits


@torch.library.custom_op("deltarule::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    d_loss: Tensor, d_x: Tensor, d_weight: Tensor, share: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The kept gradients times d loss; x and weight tell autograd what they depend on."""
    scale = d_loss * share
    return d_x * scale.to(d_x.dtype), d_weight * scale.to(d_weight.dtype)


@cross_entropy.register_fake
def _fake(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses, lse = (logits.new_empty(targets.shape, dtype=torch.float32) for _ in range(2))
    return losses, lse


@cross_entropy_backward.register_fake
def _backward_fake(d_losses: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@linear_cross_entropy.register_fake
def _linear_fake(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, dtype: torch.dtype,
    with_gradient: bool, triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(dtype, torch.float32)
    loss, share = (x.new_empty((), dtype=wide) for _ in range(2))
    d_x, d_weight = (t.new_empty(t.shape if with_gradient else 0) for t in (x, weight))
    return loss, d_x, d_weight, share


@linear_cross_entropy_backward.register_fake
def _linear_backward_fake(
    d_loss: Tensor, d_x: Tensor, d_weight: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor]:
    return d_x.new_empty(d_x.shape), d_weight.new_empty(d_weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.ignore_index = inputs[2]


def _backward(ctx: Any, d_losses: Tensor | None, _: Any) -> tuple[Any, ...]:
    if d_losses is None:
        return None, None, None
    return cross_entropy_backward(d_losses, *ctx.saved_tensors, ctx.ignore_index), None, None


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *inputs[:2])
    ctx.with_gradient = inputs[5]


def _linear_backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Any, ...]:
    assert ctx.with_gradient
    return *linear_cross_entropy_backward(d_loss, *ctx.saved_tensors), *(None,) * 5


cross_entropy.register_autograd(_backward, setup_context=_setup_context)
linear_cross_entropy.register_autograd(_linear_backward, setup_context=_setup_linear)
cross_entropy_backward.register_autograd(no_second_derivative)
linear_cross_entropy_backward.register_autograd(no_second_derivative)
