"""Rows of other processes: the few before the first token here, or all of them."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.context.context import Context
from deltarule.ops.context.exchange import exchanged


class LastRows:
    """The last `reach` rows of a process on their way to the next, and their gradients back.

    They travel while others compute between `send` and `receive`, and between these backwards. No
    process may have fewer rows.
    """

    wait: Callable[[], None]

    def __init__(self, context: Context, reach: int) -> None:
        shortest = min(b - a for a, b in itertools.pairwise(context.bounds))
        if shortest < reach:
            raise ValueError(
                f"a process of the context has {shortest} tokens, but the layer looks {reach} "
                "back: share the rows out over fewer processes"
            )
        self.context, self.reach = context.alone, reach

    def send(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send the last rows of x [B, R or more, D]; return x for later uses, and what comes."""
        return _Sent.apply(self, x)  # type: ignore[no-untyped-call]

    def receive(self, coming: Tensor) -> Tensor:
        """[B, R, D] of the process before; zeros where there is none."""
        return _Received.apply(self, coming)  # type: ignore[no-untyped-call]

    def before(self, rows: Tensor, otherwise: Tensor) -> Tensor:
        """[N, R, D] what comes before each sequence here: the rows received, or `otherwise`."""
        known = torch.arange(self.reach, 0, -1, device=rows.device) <= self.context.position
        first, others = otherwise.to(rows.dtype).tensor_split([len(rows)])
        # A gradient has to be sent even if what was received is not used.
        rows = rows.masked_fill(~known[:, None], 0)
        return torch.cat([rows if self.context.goes_on else first + rows, others])

    def exchange(self, rows: Tensor, distance: int) -> Tensor:
        """Let rows go, and return where others are after `wait`."""
        (coming,), self.wait = exchanged(self.context, (rows,), distance)
        return coming


def rows_before(context: Context, x: Tensor, reach: int, otherwise: Tensor) -> Tensor:
    """Return what comes before the first token of each sequence here, [N, R, D].

    Of a sequence that goes on from the process before that is its last R rows there, of the
    processes' x [B, R or more, D], and zeros before its own first token; else it is `otherwise`.
    """
    last_rows = LastRows(context, reach)
    if reach == 0:
        return otherwise
    _, coming = last_rows.send(x)
    return last_rows.before(last_rows.receive(coming), otherwise)


def all_rows(context: Context, x: Tensor) -> Tensor:
    """[B, T here, ...] of every process, end to end: [B, T, ...]."""
    return _AllRows.apply(context, x)  # type: ignore[no-untyped-call]


def one_of_each(context: Context, x: Tensor) -> Tensor:
    """[B, D] of every process, in their order: [B, processes, D]."""
    one_row = context._replace(bounds=tuple(range(context.size + 1)), offsets=None)
    return all_rows(one_row, x.unsqueeze(1))


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, last_rows: LastRows, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.last_rows, ctx.shape = last_rows, x.shape
        ctx.set_materialize_grads(False)
        return x.view_as(x), last_rows.exchange(x[:, x.shape[1] - last_rows.reach :], 1)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor | None, d_rows: Tensor) -> tuple[None, Tensor]:
        ctx.last_rows.wait()
        d_x = d_rows.new_zeros(ctx.shape) if d_x is None else d_x.clone()
        d_x[:, d_x.shape[1] - ctx.last_rows.reach :] += d_rows
        return None, d_x


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, last_rows: LastRows, rows: Tensor) -> Tensor:
        ctx.last_rows = last_rows
        last_rows.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[None, Tensor]:
        return None, ctx.last_rows.exchange(d_rows, -1)


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, x: Tensor) -> Tensor:
        ctx.context = context.alone
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
