"""Kernels of a decoding step from Hopper on, each of which starts before the one before it ends.

A kernel that takes a few microseconds takes as long again to start and to end. In a chain, its
programs start as the processors become free, read what no kernel of the chain writes, such as
weights, and wait only then for all that was launched before.

A weight that the last launch may have written must not be read early: only a decoder enters a
chain, whose step begins with other kernels. Its states may be read early, too, each once: no other
kernel of the step writes them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHAIN: ContextVar[bool] = ContextVar("CHAIN", default=False)
# Of each chain so many zeros, in which its kernels count one after the other; they leave zeros.
COUNTERS: ContextVar[Tensor | None] = ContextVar("COUNTERS", default=None)
COUNTED = 256
# Addresses of the states that no kernel of the chain has been given yet.
UNREAD: ContextVar[set[int] | None] = ContextVar("UNREAD", default=None)


@contextmanager
def chain(device: torch.device, states: Iterable[Tensor] = ()) -> Iterator[Tensor | None]:
    """Launches inside of kernels that can be chained are, where the GPU knows how.

    They count in the tensor that this gives, which a graph of them needs for as long as it is.
    """
    able = can_follow(device)
    counted = counters(device) if able else None
    tokens = CHAIN.set(able), COUNTERS.set(counted)
    unread = UNREAD.set({x.data_ptr() for x in states} if able else None)
    try:
        yield counted
    finally:
        CHAIN.reset(tokens[0])
        COUNTERS.reset(tokens[1])
        UNREAD.reset(unread)


def chained() -> dict[str, bool]:
    """Constants of a launch here, and the compiler's option that goes with them."""
    return {"CHAINED": True, "launch_pdl": True} if CHAIN.get() else {"CHAINED": False}


@cache
def can_follow(device: torch.device) -> bool:
    """Whether a kernel there can start before the one before it ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def following(device: torch.device) -> dict[str, bool]:
    """The same of a kernel that needs no chain around it: it reads nothing before it waits."""
    apart = not CHAIN.get() and can_follow(device)
    return chained() | ({"FOLLOWS": True, "launch_pdl": True} if apart else {"FOLLOWS": False})


def counters(device: torch.device) -> Tensor:
    """Zeros for one kernel to count in: those of the chain, or new ones."""
    own = COUNTERS.get()
    return torch.zeros(COUNTED, dtype=torch.int32, device=device) if own is None else own


def read_early(*states: Tensor) -> bool:
    """Whether a kernel here may read states, which it overwrites, before it waits: once."""
    unread = UNREAD.get()
    places = {state.data_ptr() for state in states}
    if not unread or not places <= unread:
        return False
    unread -= places
    return True


@triton.jit
def let_next_start(CHAINED: tl.constexpr):
    """The next kernel may start; what it reads before it waits is written by none of the chain."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """All kernels before this one are done, and what they wrote is there."""
    if CHAINED:
        gdc_wait()


@triton.jit
def begin(CHAINED: tl.constexpr, EARLY: tl.constexpr = False):
    """Both, for a kernel that has nothing to read before it waits; EARLY: it waits later."""
    let_next_start(CHAINED)
    wait_for_last(CHAINED and not EARLY)


@triton.jit
def follow(FOLLOWS: tl.constexpr):
    """Outside of a chain the next kernel may start once those before this one are done.

    Whatever it reads before it waits is then written by this one at most.
    """
    wait_for_last(FOLLOWS)
    let_next_start(FOLLOWS)
