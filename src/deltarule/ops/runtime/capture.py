"""The capture of a CUDA graph beside what else the process does."""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch

LOCK = threading.Lock()
# Whether garbage was collected, as each capture under way found it.
collected: list[bool] = []


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> Iterator[None]:
    """Record what runs inside; another thread may use the GPU, and no garbage is collected.

    An earlier graph may be part of that garbage, and CUDA ends a capture in which one is freed.
    """
    with LOCK:
        collected.append(gc.isenabled())
        gc.disable()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    finally:
        # The last of several threads to leave takes what the first one found.
        with LOCK:
            if collected.pop():
                gc.enable()
