"""A sliding window read in blocks of its own size: a block sees itself and the block before it.

T tokens then take 2 T window scores, and no mask of T x T.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deltarule.ops.context import Context


def attend_in_blocks(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: int,
    sequence: Tensor | None,
) -> Tensor:
    """Softmax attention of tokens [B, T, heads, D] with nothing before them, over the window.

    Args:
        attend: Softmax attention of q, k and v with a mask.
        q: Queries.
        k: Keys, of as many heads or of a divisor.
        v: Values like k.
        size: The window.
        sequence: [T] of packed tokens, whose batch is 1. None: a row is a sequence.
    """
    batch, tokens, heads = q.shape[:3]
    if k.shape[2] != heads:
        # PyTorch's kernels for grouped heads take no mask.
        k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (blocks(x, size) for x in (q, k, v))
    first, others = block_masks(size, sequence, q.device)
    o = attend(q[:, 0], k[:, 0], v[:, 0], first)
    q, k, v = (x.flatten(0, 1) for x in (q[:, 1:], with_block_before(k), with_block_before(v)))
    after = attend(q, k, v, others).unflatten(0, (batch, -1)).flatten(1, 2)
    return torch.cat([o, after], dim=1)[:, :tokens]


def blocks(x: Tensor, size: int) -> Tensor:
    """Cut rows [B, T, ...] into blocks [B, N, size, ...]; zeros behind the last token fill up.

    Examples:
        >>> blocks(torch.tensor([[1, 2, 3]]), 2).tolist()
        [[[1, 2], [3, 0]]]
    """
    fill = x.new_zeros(len(x), -x.shape[1] % size, *x.shape[2:])
    return torch.cat([x, fill], dim=1).unflatten(1, (-1, size))


def with_block_before(x: Tensor) -> Tensor:
    """Put each block but the first behind the one before: [B, N - 1, 2 size, ...].

    Examples:
        >>> with_block_before(torch.tensor([[[1, 2], [3, 0]]])).tolist()
        [[[1, 2, 3, 0]]]
    """
    return torch.cat([x[:, :-1], x[:, 1:]], dim=2)


def block_masks(
    size: int, sequence: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """What the first block sees of itself, and what others see of `with_block_before`.

    Args:
        size: Of a block, and of the window.
        sequence: [T] of packed tokens. None: a row is a sequence, and all blocks see alike.
        device: Of the masks.

    Returns:
        None, or [1, 1, size, size]; [1 or N - 1, 1, size, 2 size]. None is plain causal.
    """
    column = torch.arange(-size, size, device=device)
    behind = column[size:].unsqueeze(1) - column
    near = ((behind >= 0) & (behind < size))[None, None]
    if sequence is None:
        return None, near
    own = blocks(sequence[None], size)
    first = (own[:, :1].unsqueeze(3) == own[:, :1].unsqueeze(2)).tril()
    same = own[:, 1:].unsqueeze(3) == with_block_before(own).unsqueeze(2)
    return first, near & same.transpose(0, 1)


def visible_up_to(
    context: Context, window: int | None, device: torch.device
) -> tuple[int, Tensor | None]:
    """What the rows of one process see of all rows up to its last.

    Returns:
        The first row that any of them sees; and which of those from it on each sees, None where
        causal from the last row on is all there is to say.
    """
    lowest = 0 if window is None else max(0, context.first - window + 1)
    if context.offsets is not None:
        lowest = max(lowest, context.first - context.position)
    if window is None and context.offsets is None:
        return lowest, None
    token = torch.arange(lowest, context.last, device=device)
    behind = token[context.first - lowest :, None] - token
    visible = behind >= 0
    if window is not None:
        visible &= behind < window
    if context.offsets is not None:
        ends = torch.tensor(context.offsets[1:], device=device)
        document = torch.searchsorted(ends, token, right=True)
        visible &= document[context.first - lowest :, None] == document
    return lowest, visible
