"""The capture of a CUDA graph beside what else the process does."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> Iterator[None]:
    """Record what runs inside; another thread may use the GPU, and no garbage is collected.

    An earlier graph may be part of that garbage, and CUDA ends a capture in which one is freed.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
