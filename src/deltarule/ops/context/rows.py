"""Rows of other processes: the few before the first token here, or all of them."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.context.context import Context
from deltarule.ops.context.exchange import exchanged


def rows_before(context: Context, x: Tensor, reach: int, otherwise: Tensor) -> Tensor:
    """Return what comes before the first token of each sequence here.

    Args:
        context: Where the tokens are.
        x: [B, R or more, D], the last rows of this process.
        reach: How many rows to look back, R.
        otherwise: [N, R, D], what came before the sequences that begin here.

    Returns:
        [N, R, D]: of a sequence that goes on from the process before, its last rows there (zeros
        before its own first token), else `otherwise`.

    Raises:
        ValueError: A process has fewer rows than the others look back.
    """
    shortest = min(b - a for a, b in itertools.pairwise(context.bounds))
    if shortest < reach:
        raise ValueError(
            f"a process of the context has {shortest} tokens, but the layer looks {reach} back: "
            "share the rows out over fewer processes"
        )
    if reach == 0:
        return otherwise
    tokens = context.last - context.first
    place = torch.arange(tokens - reach, tokens, device=x.device)
    own = x[:, x.shape[1] - reach :].masked_fill((place < context.tail)[:, None], 0)
    before: Tensor = _Before.apply(context, own)  # type: ignore[no-untyped-call]
    # Where a sequence begins nobody looks at what came, but a gradient has to be sent all the same.
    before = before if context.goes_on else otherwise[: len(before)].to(x.dtype) + 0 * before
    return torch.cat([before, otherwise[len(before) :].to(x.dtype)])


def all_rows(context: Context, x: Tensor) -> Tensor:
    """[B, T here, ...] of every process, end to end: [B, T, ...]."""
    whole: Tensor = _AllRows.apply(context, x)  # type: ignore[no-untyped-call]
    return whole


def one_of_each(context: Context, x: Tensor) -> Tensor:
    """[B, D] of every process, in their order: [B, processes, D]."""
    one_row = context._replace(bounds=tuple(range(context.size + 1)), offsets=None)
    return all_rows(one_row, x.unsqueeze(1))


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, rows: Tensor) -> Tensor:
        ctx.context = context
        before = exchanged(context, (rows,), 1)
        return torch.zeros_like(rows) if before is None else before[0]

    @staticmethod
    def backward(ctx: Any, d_before: Tensor) -> tuple[None, Tensor]:
        after = exchanged(ctx.context, (d_before,), -1)
        return None, torch.zeros_like(d_before) if after is None else after[0]


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, x: Tensor) -> Tensor:
        ctx.context = context
        sizes = [b - a for a, b in itertools.pairwise(context.bounds)]
        padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, max(sizes) - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded.contiguous(), group=context.group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> tuple[None, Tensor]:
        d_whole = d_whole.contiguous().clone()
        dist.all_reduce(d_whole, group=ctx.context.group)
        return None, ctx.context.part(d_whole)
