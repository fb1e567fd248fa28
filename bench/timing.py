"""Clocks of a GPU: CUDA graphs, events and the host; memory; the two rates that bound everything.

On the CPU, where the tests run, the same functions read the host's clock, and there is no graph.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Run = Callable[[], object]
# Tensors by name -> output.
Operator = Callable[[Mapping[str, Tensor]], Tensor]

# A graph holds calls for so long at the least: a replay costs microseconds of its own.
GRAPH_MS = 2.0
MOST_CALLS = 100
# So many calls fit the queue of launches, where the host never waits for the GPU.
QUEUED_CALLS = 20
MIB = 2**20


def graph_ms(runs: Sequence[Run], repeats: int) -> float:
    """Median milliseconds of a call in a replayed CUDA graph, the runs taking turns in it.

    Runs with inputs of their own take turns so that a small input is not found in the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    each = statistics.median(event_times(runs, 3))
    calls = min(max(math.ceil(GRAPH_MS / max(each, 1e-3)), len(runs)), max(MOST_CALLS, len(runs)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in itertools.islice(itertools.cycle(runs), calls):
            run()
    event_times([graph.replay], 2)
    return statistics.median(event_times([graph.replay], repeats)) / calls


def eager_ms(runs: Sequence[Run], repeats: int) -> float:
    """Median milliseconds from one call to the next, launched from Python as a user does."""
    event_times(runs, 3)
    return statistics.median(event_times(runs, repeats))


def event_times(runs: Sequence[Run], repeats: int) -> list[float]:
    """Milliseconds of each call on the GPU's clock, waiting for nothing in between."""
    turns = list(itertools.islice(itertools.cycle(runs), max(repeats, len(runs))))
    if not torch.cuda.is_available():
        return [1e3 * host_seconds(run) for run in turns]
    marks = []
    for run in turns:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def host_us(run: Run, repeats: int) -> float:
    """Median microseconds that the host spends on a call: Python and launches, no waiting."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(QUEUED_CALLS):
            run()
        times.append((time.perf_counter() - start) / QUEUED_CALLS * 1e6)
    synchronize()
    # The first round warms up.
    return statistics.median(times[1:])


def host_seconds(run: Run) -> float:
    """Seconds until a call has finished on the device."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def extra_mib(run: Run) -> float | None:
    """Peak MiB of a call beyond what was allocated before it; None on the CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def kernel_ms(run: Run) -> dict[str, float]:
    """Milliseconds of the kernels in a run, by their names."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return {x.key: x.self_device_time_total / 1e3 for x in profile.key_averages()}


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    # By a kernel: a graph gives a plain copy to the copy engines, which are slower.
    return 2 * x.nbytes / (graph_ms([lambda: torch.mul(x, 1.0, out=y)], 10) * 1e-3)


def matrix_rate() -> float:
    """Operations a second of a large bfloat16 matrix product, on random numbers."""
    size = 8192
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / (graph_ms([lambda: x @ x], 10) * 1e-3)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved_seconds(runs: Mapping[str, Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, in turns, so that a slow moment of the machine meets all of them."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(host_seconds(run))
    return seconds


def outputs(
    run: Operator, inputs: Mapping[str, Tensor], weight: Tensor | None
) -> dict[str, Tensor]:
    """o, and if there is a weight the gradients of sum(o * weight) by inputs, by name."""
    if weight is None:
        with torch.no_grad():
            return {"o": run(inputs)}
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o = run(leaves)
    found = torch.autograd.grad(o, [*leaves.values()], weight.to(o.dtype), allow_unused=True)
    gradients = {f"grad {x}": y for x, y in zip(leaves, found, strict=True) if y is not None}
    return {"o": o.detach(), **gradients}
