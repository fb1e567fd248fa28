"""The loss of next-token prediction; the backward pass keeps no copy of the logits."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows in float32 at a time: the only memory beyond the logits and their gradient.
_ROWS = 1024


def next_token_loss(
    logits: Float[Tensor, "*rows vocab"],
    targets: Int[Tensor, "*rows"],
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    r"""Mean cross-entropy, in nats a token, of the tokens that came.

    .. math::
        \mathrm{loss} = \mathrm{mean}_t \left( \log \sum_j e^{\mathrm{logits}_{t,j}}
            - \mathrm{logits}_{t, \mathrm{target}_t} \right)

    The sums are taken in float32 whatever the dtype of the logits. For the backward pass only the
    logits, which exist anyway, and one number a token are kept.

    Args:
        logits: [..., vocab_size], what the model returned.
        targets: Integers [...] in [0, vocab_size): the token after each position.
        ignore_index: The target of positions that do not count.

    Returns:
        A float32 scalar (float64 with float64 logits), 0 when no position counts. It can be
        differentiated once.

    Raises:
        ValueError: The shapes do not match, or targets are not integers in range.

    Example:
        >>> next_token_loss(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must be {list(logits.shape[:-1])}, the logits' shape without its last axis, "
            f"got {list(targets.shape)}"
        )
    _check_targets(targets, logits.shape[-1], ignore_index)
    flat = logits.reshape(-1, logits.shape[-1])
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, targets.reshape(-1).long(), ignore_index
    )
    return loss


def _check_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be int64 or int32, got {targets.dtype}")
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
    if wrong.any():
        raise ValueError(
            f"targets must lie in [0, {vocab_size}) or be ignore_index={ignore_index}, "
            f"got {int(targets[wrong][0])}"
        )


class _CrossEntropy(torch.autograd.Function):
    """loss = lse - logits[target];  d loss / d logits = exp(logits - lse) - 1_target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        counts = targets != ignore_index
        safe_targets = targets.where(counts, 0)
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
