"""Kernels compiled side by side before a first call, and a list of those that Triton compiles.

A call whose kind did not come before in this process is gone through twice: once its launches only
hand their kernels to threads that compile them, then they run.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any, NamedTuple

import torch
from triton import AsyncCompileMode, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from deltarule.ops.runtime.calls import compiled
from deltarule.ops.runtime.launch import compiling

# More only wait for each other, where Triton is in Python.
MOST_THREADS = 16


def compiled_together(run: Callable[[], object], kind: Hashable) -> None:
    """Compile all that `run` launches, before the first such call; it must look at no values."""
    # Memory that a captured graph takes stays taken.
    if kind in compiled or torch.cuda.is_current_stream_capturing():
        return
    compiled.add(kind)
    # What Triton's mode leaves behind where a kernel does not compile ends with the context.
    Context().run(side_by_side, run)


def side_by_side(run: Callable[[], object]) -> None:
    """Go through launches that compile in threads.

    Errors are left to the true launch, if it comes: a backward that lacks memory may never do so.
    """
    threads = min(os.cpu_count() or 1, MOST_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        with AsyncCompileMode(pool, ignore_errors=True) as mode, compiling(), suppress(Exception):
            run()
        kernels = [future.kernel for future in mode.future_kernels.values()]
        pool.map(make_launcher, [kernel for kernel in kernels if kernel is not None])


def make_launcher(kernel: CompiledKernel) -> None:
    """Have Triton's cache hold what launches a kernel: before 3.7 a C function of its own."""
    driver.active.launcher_cls(kernel.src, kernel.metadata)


class Compiled(NamedTuple):
    """A kernel, the seconds it took, and whether it lay in Triton's cache already."""

    kernel: str
    seconds: float
    cached: bool


@contextmanager
def compilations() -> Iterator[list[Compiled]]:
    """The kernels that are compiled or loaded inside, as they come to be ready."""
    found: list[Compiled] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        found.append(Compiled(str(src.name), times.total / 1e6, cache_hit))
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **others)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before
