"""Tensors that every call reads and none writes: made once, and kept where graphs know them."""

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from deltarule.ops.dispatch import PLAIN
from deltarule.ops.runtime.launch import TAPE
from deltarule.ops.runtime.replay import capturing

# By what makes them and of what.
made_once: dict[Hashable, Tensor] = {}


def constant(q: Tensor, make: Callable[..., Tensor], *of: Hashable) -> Tensor:
    """make(*of) where q lies, the same in every call and kept for good."""
    if (found := made_once.get((make, *of))) is None:
        # What a graph captures is there when it is replayed: nobody else may read that.
        if type(q) not in PLAIN or capturing():
            return make(*of)
        found = made_once.setdefault((make, *of), made_aside(q.device, make, *of))
    if (tape := TAPE.get()) is not None:
        tape.constants.append(found)
    return found


def made_aside(device: torch.device, make: Callable[..., Tensor], *of: Hashable) -> Tensor:
    """make(*of), done for all streams and in memory that no graph calls its own.

    A thread begins without the modes and the memory of those that it may be needed in.
    """

    def made() -> Tensor:
        if device.type != "cuda":
            return make(*of)
        stream, done = torch.cuda.Stream(device), torch.cuda.Event()
        with torch.cuda.stream(stream):
            found = make(*of)
        done.record(stream)
        done.synchronize()
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()
