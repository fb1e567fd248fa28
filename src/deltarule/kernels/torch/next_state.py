"""The scan over chunks, forward and backward: the one stage that is sequential.

    X = x0 + from_state S^T        S <- S Diag(whole) + sum over writes of X^T y

The backward walks the same chunks from the last to the first:

    dX = d_x0 + y dS^T             dS <- dS Diag(whole) + d_read + dX^T from_state
"""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Write(NamedTuple):
    """Values X = x0 + from_state S^T (None: no such part), along keys y decayed to the end."""

    x0: Tensor
    from_state: Tensor | None
    y: Tensor


def next_state(
    writes: list[Write], whole: Tensor | None, state: Tensor, bounds: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Carry state [N, H, G, V, K], in place, through a slab of chunks.

    Returns the state at each chunk's start [M, H, G, V, K], and the values X of each write. The
    longer sequences come first, and those that have ended keep their state.
    """
    states = state.new_empty(bounds[-1], *state.shape[1:])
    values = [write.x0 for write in writes]
    for first, last in pairwise(bounds):
        here, running = slice(first, last), state[: last - first]
        states[here] = running
        if whole is not None:
            running *= whole[here]
        for x, (_, from_state, y) in zip(values, writes, strict=True):
            if from_state is not None:
                x[here] += from_state[here] @ states[here].mT
            running += x[here].mT @ y[here]
    return states, values


def next_state_backward(
    d_values: list[Tensor],
    d_read: Tensor,
    writes: list[Write],
    whole: Tensor | None,
    d_state: Tensor,
    bounds: list[int],
) -> Tensor:
    """Carry the gradient of the state, in place, back through a slab of chunks.

    d_values are the gradients of the values X by the outputs and become those by everything;
    d_read [M, H, G, V, K] are those of the states by the outputs. Returns the gradient of the
    state at each chunk's end.
    """
    d_ends = d_state.new_empty(bounds[-1], *d_state.shape[1:])
    for first, last in reversed(list(pairwise(bounds))):
        here, running = slice(first, last), d_state[: last - first]
        d_ends[here] = running
        if whole is not None:
            running *= whole[here]
        running += d_read[here]
        for dx, (_, from_state, y) in zip(d_values, writes, strict=True):
            dx[here] += y[here] @ d_ends[here].mT
            if from_state is not None:
                running += dx[here].mT @ from_state[here]
    return d_ends
