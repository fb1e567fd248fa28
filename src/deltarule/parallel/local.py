"""Parameters that are split over processes, seen by their layer as the plain tensors it has here.

A split parameter is a DTensor of the whole shape and under the whole model's name, so that
optimizers, clipping and checkpoints treat it as one. While its module runs, and only then, the
local part stands in its place: layers and kernels know nothing of it. Every process then holds the
same stream x, computes its own part of y from it, and the parts are summed:

    y = sum_ranks f_rank(x)        dx = sum_ranks df_rank(dy)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltarule.nn.recomputed import SURROUNDINGS

Group = dist.ProcessGroup


class Enclosure:
    """A module that begins where processes differ and ends where they sum what they have.

    It maps x, its first argument, to y, or to a tuple whose first entry is y. Parameters named
    `stepped` are kept as [steps, rows of a step, ...]; their layer wants [steps * rows, ...].
    """

    def __init__(self, module: nn.Module, group: Group, stepped: set[str]) -> None:
        self.module, self.group, self.stepped = module, group, stepped
        self.running: list[ExitStack] = []
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    @contextmanager
    def local_tensors(self) -> Iterator[None]:
        """Within, the module's parameters and buffers are what this process has of them."""
        swapped: list[tuple[dict[str, Any], str, Tensor]] = []
        for path, part in self.module.named_modules():
            for table in (part._parameters, part._buffers):
                for name, whole in table.items():
                    if whole is not None:
                        swapped.append((table, name, whole))
                        table[name] = self._local(f"{path}.{name}".lstrip("."), whole)
        try:
            yield
        finally:
            for table, name, whole in swapped:
                table[name] = whole

    def _local(self, name: str, whole: Tensor) -> Tensor:
        if not isinstance(whole, DTensor):
            # Every process has all of it and uses it on its own heads.
            return enter(whole, self.group) if whole.requires_grad else whole
        local = whole.to_local()
        return local.flatten(0, 1) if name in self.stepped else local

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        running = ExitStack()
        running.enter_context(self.local_tensors())
        # What the backward computes again, it computes on local tensors too.
        SURROUNDINGS.append(self.local_tensors)
        running.callback(SURROUNDINGS.pop)
        self.running.append(running)
        return (enter(args[0], self.group), *args[1:])

    def _after(self, module: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
        self.running.pop().close()
        if y is None:
            # The module has raised.
            return None
        return (leave(y[0], self.group), *y[1:]) if isinstance(y, tuple) else leave(y, self.group)


def enter(x: Tensor, group: Group) -> Tensor:
    """Return x, alike everywhere, to what differs between processes: its gradients are summed."""
    return _Sum.apply(x, group, False, True)  # type: ignore[no-untyped-call]


def leave(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all processes' x, which all of them use alike from here on."""
    return _Sum.apply(x, group, True, False)  # type: ignore[no-untyped-call]


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all processes' x, which each of them uses in a way of its own."""
    return _Sum.apply(x, group, True, True)  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Sums what passes forwards, backwards, or both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forwards: bool, backwards: bool) -> Tensor:
        ctx.group, ctx.backwards = group, backwards
        # A view, so that what is known by where it lies is still known.
        return summed(x, group) if forwards else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None, None]:
        return summed(d_x, ctx.group) if ctx.backwards else d_x, None, None, None


def summed(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x
