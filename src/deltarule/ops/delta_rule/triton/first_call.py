"""The kernels of a first call and their launchers, compiled side by side and not each in its turn.

A call whose kind did not come before in this process is gone through twice: once its launches only
hand their kernels to threads that compile them, then they run. Those of a backward that may
follow are compiled with those of its forward.
"""

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context

import torch
from triton import AsyncCompileMode
from triton.compiler import CompiledKernel
from triton.runtime import driver

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Plan
from deltarule.ops.runtime.launch import compiling

# More only wait for each other, where Triton is in Python.
MOST_THREADS = 16
seen: set[Hashable] = set()


def compiled_together(
    run: Callable[[], object], inputs: Inputs, plan: Plan, *choices: Hashable
) -> None:
    """Compile all that `run` launches, before the first such call; it must look at no values.

    `choices` are what besides the inputs its launches depend on.
    """
    # The plan is asked first, which costs next to nothing.
    if not inputs.q.is_cuda or (key := (compiled_together, *choices)) in plan.made:
        return
    plan.made[key] = True
    # Memory that a captured graph takes stays taken.
    if (kind := kind_of_kernels(inputs, plan, *choices)) in seen or (
        torch.cuda.is_current_stream_capturing()
    ):
        return
    seen.add(kind)
    # What Triton's mode leaves behind where a kernel does not compile ends with the context.
    Context().run(side_by_side, run)


def side_by_side(run: Callable[[], object]) -> None:
    """Go through launches that compile in threads.

    Of errors the true launch will tell, if it comes: a backward that lacks memory may never do so.
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


def kind_of_kernels(inputs: Inputs, plan: Plan, *choices: Hashable) -> Hashable:
    """What kernels are compiled for, but for what few calls differ in: those lose only time."""
    _, tokens, heads, key_size = inputs.q.shape
    return (
        *choices, inputs.q.device, inputs.q.dtype, heads, key_size, *inputs.v.shape[2:],
        inputs.erase, inputs.decay, inputs.n_steps, inputs.normalize_qk,
        inputs.cu_seqlens is None, inputs.initial_state is None, plan.call,
        plan.per_segment > 0, tokens % plan.sizes["CT"] == 0,
    )  # fmt: skip
