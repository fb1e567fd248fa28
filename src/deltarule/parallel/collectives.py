"""Sums and gathers over the processes of a group, with the gradients that belong to them.

In a part of a model that is split by heads every process holds the same stream x, computes its own
part of y from it, and the parts are summed:

    y = sum_ranks f_rank(x)        dx = sum_ranks df_rank(dy)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def enter(x: Tensor, group: Group) -> Tensor:
    """Return x, alike everywhere, to what differs between processes: its gradients are summed."""
    return _Enter.apply(x, group)  # type: ignore[no-untyped-call]


def leave(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all processes' x, which all of them use alike from here on."""
    return _Leave.apply(x, group)  # type: ignore[no-untyped-call]


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all processes' x, which each of them uses in a way of its own."""
    return enter(leave(x, group), group)


def gather_channels(x: Tensor, sizes: list[int], group: Group) -> Tensor:
    """Return the last axes of all processes, of these sizes, end to end; all use them alike."""
    return _GatherChannels.apply(x, sizes, group)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        # A view, so that what is known by where it lies is still known.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        d_x = d_x.contiguous().clone()
        dist.all_reduce(d_x, group=ctx.group)
        return d_x, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return d_x, None


class _GatherChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.rank = sizes, dist.get_rank(group)
        # Equal sizes on the way: a process may have fewer channels than the others, or none.
        padded = x.new_zeros(*x.shape[:-1], max(sizes))
        padded[..., : x.shape[-1]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor, None, None]:
        return d_whole.split(ctx.sizes, -1)[ctx.rank], None, None
