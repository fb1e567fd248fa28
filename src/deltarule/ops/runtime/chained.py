"""Kernels of a decoding step on a Hopper GPU, each of which starts before the one before it ends.

A kernel that takes a few microseconds takes as long again to start and to end. In a chain, its
programs start as the processors become free, read what no kernel of the chain writes, such as
weights, and wait only then for all that was launched before.

A weight that the last launch may have written must not be read early: only a decoder enters a
chain, whose step begins with other kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHAIN: ContextVar[bool] = ContextVar("CHAIN", default=False)


@contextmanager
def chain(device: torch.device) -> Iterator[None]:
    """Launches inside of kernels that can be chained are, where the GPU knows how."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    token = CHAIN.set(able)
    try:
        yield
    finally:
        CHAIN.reset(token)


def chained() -> dict[str, bool]:
    """Constants of a launch here, and the compiler's option that goes with them."""
    return {"CHAINED": True, "launch_pdl": True} if CHAIN.get() else {"CHAINED": False}


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
def begin(CHAINED: tl.constexpr):
    """Both, for a kernel that has nothing to read early."""
    let_next_start(CHAINED)
    wait_for_last(CHAINED)
