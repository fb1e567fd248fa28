"""The state that reaches a process from those before it, and the gradient from those after it.

Over the tokens of process r a state S becomes S M_r + U_r. So, with D the gradient of the loss by
the state at a process's end, and dS by the state at its start,

    S_{r+1} = S_r M_r + U_r        D_{r-1} = dS_r + D_r M_r^T        dM_r = S_r^T D_r

where dS_r is what the process's own outputs say. M and U of a head are K (K + V) numbers, and only
U has to travel back as dS: what is sent does not depend on the number of tokens.

M is a matrix [..., K, K], or one row [..., 1, K] where the state decays channel by channel.

Messages travel in the background, on a GPU on a stream of their own: a function `in_two` returns
once they are sent, and what it returns waits for those that arrive.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deltarule.ops.context.context import Context

T = TypeVar("T")
P = ParamSpec("P")
Halves = Generator[None, None, T]


def in_two(halves: Callable[P, Halves[T]]) -> Callable[P, Callable[[], T]]:
    """Run a function as far as its one `yield`; what it returns runs the rest, once."""

    def begin(*arguments: P.args, **named: P.kwargs) -> Callable[[], T]:
        rest = halves(*arguments, **named)
        next(rest)

        def finish() -> T:
            try:
                next(rest)
            except StopIteration as end:
                return end.value
            raise AssertionError("it stops twice")

        return finish

    return begin


def starting_state(context: Context, end: Tensor, transition: Tensor) -> Tensor:
    """Return the state that reaches this process from those before it, entry by entry.

    From U [B, HV, V, K], the state after the tokens here were nothing before them, and M [B, HV, V
    or 1, K], what the tokens here multiply each entry by, zero where a sequence begins: S [B, HV,
    V, K], zeros where a sequence begins with the first token here. Between sending and receiving
    the context's `meanwhile` is called.
    """
    halves: list[Callable[[], Any]] = []
    link = _Leave.apply(halves, context, end, transition)  # type: ignore[no-untyped-call]
    if context.meanwhile is not None:
        context.meanwhile()
    return _Arrive.apply(halves, context, link)  # type: ignore[no-untyped-call]


def applied(state: Tensor, transition: Tensor, diagonal: bool) -> Tensor:
    return state * transition if diagonal else state @ transition


class Met(NamedTuple):
    """The state before the first token here, and what `meet_back` needs: M of those after."""

    start: Tensor
    later: Tensor


@in_two
def meet(context: Context, end: Tensor, transition: Tensor, diagonal: bool) -> Halves[Met]:
    """`starting_state`, for those who take its gradient themselves."""
    found = (_folded if context.gathers else _scanned)(context, end, transition, diagonal)
    yield
    start, later = found()
    return Met(start if context.goes_on else torch.zeros_like(start), later)


@in_two
def meet_back(context: Context, d_start: Tensor, met: Met, diagonal: bool) -> Halves[Tensor]:
    """D [B, HV, V, K] by the state at the end here, from the gradients by all processes' starts."""
    d_start = d_start if context.goes_on else torch.zeros_like(d_start)
    if context.gathers:
        found = _folded_back(context, d_start, met.later, diagonal)
    else:
        found = _scanned(context, d_start, met.later if diagonal else met.later.mT, diagonal, -1)
    yield
    return found()[0]


class _Leave(torch.autograd.Function):
    """U and M leave; backwards, the gradients by all starts have come."""

    @staticmethod
    def forward(
        ctx: Any, halves: list[Any], context: Context, end: Tensor, transition: Tensor
    ) -> Tensor:
        ctx.halves = halves
        halves.append(meet(context, end, transition, diagonal=True))
        return end.new_empty(0)

    @staticmethod
    def backward(ctx: Any, d_link: Tensor) -> tuple[Any, ...]:
        met, come = ctx.halves.pop()
        d_end = come()
        d_transition = met.start * d_end
        # One row for all rows of the state.
        if met.later.shape[-2] == 1:
            d_transition = d_transition.sum(-2, keepdim=True)
        return None, None, d_end, d_transition


class _Arrive(torch.autograd.Function):
    """The state has come; backwards, the gradient by it leaves."""

    @staticmethod
    def forward(ctx: Any, halves: list[Any], context: Context, link: Tensor) -> Tensor:
        met = halves.pop()()
        ctx.halves, ctx.context = halves, context.alone
        ctx.save_for_backward(*met)
        return met.start

    @staticmethod
    def backward(ctx: Any, d_start: Tensor) -> tuple[Any, ...]:
        met = Met(*ctx.saved_tensors)
        ctx.halves.append((met, meet_back(ctx.context, d_start, met, diagonal=True)))
        return None, None, d_start.new_empty(0)


@in_two
def _folded(
    context: Context, end: Tensor, transition: Tensor, diagonal: bool
) -> Halves[tuple[Tensor, Tensor]]:
    """The state from all U and M before this process, and the M of those after it."""
    rows, start = end.shape[-2], torch.zeros_like(end)
    gathered = _gathered(context, torch.cat([end, transition], -2))
    yield
    both = gathered()
    for before in both[: context.rank]:
        start = applied(start, before[..., rows:, :], diagonal) + before[..., :rows, :]
    return start, both[context.rank + 1 :, ..., rows:, :].contiguous()


@in_two
def _folded_back(
    context: Context, d_start: Tensor, later: Tensor, diagonal: bool
) -> Halves[tuple[Tensor, Tensor]]:
    gathered = _gathered(context, d_start)
    yield
    d_starts, d_end = gathered(), torch.zeros_like(d_start)
    for rank in range(context.size - 1, context.rank, -1):
        # What the process itself passes on to those before it is not its own.
        m = later[rank - context.rank - 1]
        d_end = applied(d_end, m if diagonal else m.mT, diagonal) + d_starts[rank]
    return d_end, later


@in_two
def _gathered(context: Context, x: Tensor) -> Halves[Tensor]:
    parts = x.new_empty(context.size, *x.shape)
    work = dist.all_gather(list(parts), x.contiguous(), group=context.group, async_op=True)
    yield
    work.wait()
    return parts


@in_two
def _scanned(
    context: Context, end: Tensor, transition: Tensor, diagonal: bool, step: int = 1
) -> Halves[tuple[Tensor, Tensor]]:
    """Scan in rounds of messages, each from a process twice as far away as the last."""
    reach, pair = 1, (end, transition)
    before, wait = exchanged(context, pair, step)
    yield
    while reach < context.size:
        wait()
        state = applied(before[0], pair[1], diagonal) + pair[0]
        pair, reach = (state, applied(before[1], pair[1], diagonal)), 2 * reach
        last = reach >= context.size
        before, wait = exchanged(context, pair[:1] if last else pair, step * (1 if last else reach))
    wait()
    return before[0], transition


def exchanged(
    context: Context, tensors: tuple[Tensor, ...], distance: int
) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """Send tensors to the process `distance` after this one, and receive those of the one before.

    What is received has the same shapes, zeros where there is no sender; a function waits for it.
    """
    tensors = tuple(x.contiguous() for x in tensors)
    received = tuple(torch.zeros_like(x) for x in tensors)
    ranks = dist.get_process_group_ranks(context.group)
    receiver, sender = context.rank + distance, context.rank - distance
    todo = []
    if 0 <= receiver < context.size:
        todo += [dist.P2POp(dist.isend, x, ranks[receiver], context.group) for x in tensors]
    if 0 <= sender < context.size:
        todo += [dist.P2POp(dist.irecv, x, ranks[sender], context.group) for x in received]
    # All in one batch: no order of two processes can make each wait for the other.
    works = dist.batch_isend_irecv(todo) if todo else []

    def wait() -> None:
        # Each holds its tensor, which may know who waits.
        while works:
            works.pop().wait()

    return received, wait
