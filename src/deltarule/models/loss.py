"""The loss of next-token prediction, of logits or of what they are made of, which keeps none."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltarule.ops.checks import check_dense, readable
from deltarule.ops.fused import cross_entropy as fused
from deltarule.ops.fused.cross_entropy import CrossEntropy
from deltarule.ops.fused_kernels import kernel_runs, why_not_fused
from deltarule.shapes import Hidden

# Rows in float32 at a time: the only memory beyond the logits and their gradient.
_ROWS = 1024


def next_token_loss(
    logits: Float[Tensor, "*rows vocab"], targets: Int[Tensor, "*rows"], ignore_index: int = -100
) -> Float[Tensor, ""]:
    r"""Mean cross-entropy, in nats per token, of the target tokens.

    .. math::
        \mathrm{loss} = \mathrm{mean}_t \left( \log \sum_j e^{\mathrm{logits}_{t,j}}
            - \mathrm{logits}_{t, \mathrm{target}_t} \right)

    The sums are taken in float32 whatever the dtype of the logits. The backward
    pass keeps only the logits, which exist anyway, and one number per token.

    Args:
        logits: [..., vocab_size], what the model returned.
        targets: Integers [...] in [0, vocab_size): the token after each position.
        ignore_index: The target of positions that do not count.

    Returns:
        A float32 scalar (float64 with float64 logits) that can be differentiated once. Where no
        position counts it is 0, not PyTorch's nan: a process may have a part with padding alone.

    Raises:
        ValueError: The shapes do not match, or targets are not integers in range.

    Examples:
        >>> next_token_loss(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)
    """
    _check_targets(targets, logits.shape[:-1], "that of logits", logits.shape[-1], ignore_index)
    flat = logits.reshape(-1, logits.shape[-1])
    call = CrossEntropy(flat, targets.reshape(-1), ignore_index)
    if kernel_runs(flat, why_not_fused(flat)):
        return _run_triton(call)
    loss: Tensor = PlainCrossEntropy.apply(*call)  # type: ignore[no-untyped-call]
    return loss


def linear_next_token_loss(
    x: Hidden,
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, "*rows"],
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    r"""Mean cross-entropy, in nats per token, of a model's head, without holding all its logits.

    .. math::
        \mathrm{logits} = x W^\top \qquad \mathrm{loss} = \mathrm{mean}_t \left(
            \log \sum_j e^{\mathrm{logits}_{t,j}} - \mathrm{logits}_{t, \mathrm{target}_t} \right)

    The logits and gradients of a few rows are computed at a time: at most 2^27 logits exist, and
    the backward pass keeps only the gradients of x and weight. Under autocast the products are in
    its dtype.

    Args:
        x: [..., hidden_size], what `CausalLM.hidden` returned.
        weight: [vocab_size, hidden_size] of the head.
        targets: Integers [...] in [0, vocab_size): the token after each position.
        ignore_index: The target of positions that do not count.

    Returns:
        A float32 scalar (float64 with float64 x) that can be differentiated once. Where no
        position counts it is 0, not PyTorch's nan: a process may have a part with padding alone.

    Raises:
        ValueError: The shapes or dtypes do not match, or targets are not integers in range.

    Examples:
        >>> linear_next_token_loss(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([1, -100]))
        tensor(1.3863)
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"weight must be [vocab_size, {x.shape[-1]}] for x {list(x.shape)}, "
            f"got {list(weight.shape)}"
        )
    _check_targets(targets, x.shape[:-1], "that of x", weight.shape[0], ignore_index)
    # In which F.linear would return x W^T.
    rows, dtype, kind = x.reshape(-1, x.shape[-1]), x.dtype, x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if autocast and torch.float64 not in (dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(kind)
    elif dtype != weight.dtype:
        raise ValueError(f"weight must be {dtype} like x outside autocast, got {weight.dtype}")
    gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    triton = dtype != torch.float64 and why_not_fused(x) is None
    flat = targets.reshape(-1)
    loss: Tensor = fused.linear_cross_entropy(
        rows, weight, flat, ignore_index, dtype, gradient, triton
    )
    return loss


def _run_triton(call: CrossEntropy) -> Tensor:
    losses: Tensor = fused.cross_entropy(*call)
    return losses.sum() / (call.targets != call.ignore_index).sum().clamp(min=1)


def _check_targets(
    targets: Tensor, shape: torch.Size, of: str, vocab_size: int, ignore_index: int
) -> None:
    check_dense("targets", targets)
    if targets.shape != shape:
        raise ValueError(
            f"targets must be {list(shape)}, {of} without its last axis, got {list(targets.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be int64 or int32, got {targets.dtype}")
    if not readable(targets):
        return
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
    if wrong.any():
        raise ValueError(
            f"targets must lie in [0, {vocab_size}) or be ignore_index={ignore_index}, "
            f"got {int(targets[wrong][0])}"
        )


class PlainCrossEntropy(torch.autograd.Function):
    """loss = lse - logits[target];  d loss / d logits = exp(logits - lse) - 1_target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        counts = targets != ignore_index
        safe_targets = targets.where(counts, 0).long()
        wide = torch.promote_types(logits.dtype, torch.float32)
        starts = range(0, max(len(logits), 1), _ROWS)
        lse = torch.cat([logits[start : start + _ROWS].to(wide).logsumexp(-1) for start in starts])
        losses = lse - logits.gather(1, safe_targets[:, None])[:, 0].to(wide)
        weights = counts.to(wide) / counts.sum().clamp(min=1)
        ctx.save_for_backward(logits, safe_targets, lse, weights)
        return (losses.where(counts, 0) * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, lse, weights = ctx.saved_tensors
        scale = (weights * grad_loss)[:, None]
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), _ROWS):
            rows = slice(start, start + _ROWS)
            probabilities = (logits[rows] - lse[rows, None]).exp()
            ones = torch.ones_like(lse[rows, None])
            errors = probabilities.scatter_add(1, targets[rows, None], -ones)
            grad[rows] = (errors * scale[rows]).where(scale[rows] != 0, 0)
        return grad, None, None
