"""Ways for the weights and gradients of blocks to travel, to be timed beside the library's own.

"nothing sent" is how fast a step could be. Copy engines, which leave all multiprocessors to the
products, were 0.4 % faster on two H200s (docs/figures/several_gpus_h200.json), and went.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deltarule.parallel.sharding import WideSums

Group = dist.ProcessGroup
# Of PyTorch 2.13, and of those before.
NEW = hasattr(dist, "all_gather_single")
GATHER = "all_gather_single" if NEW else "all_gather_into_tensor"
REDUCE = "reduce_scatter_single" if NEW else "reduce_scatter_tensor"
# Collectives, and how often what they are given travels.
COLLECTIVES = {"all_gather": 1, GATHER: 1, REDUCE: 1, "all_to_all_single": 1, "all_reduce": 2}


def room(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


class Way:
    """What FSDP2 asks for room, and then for a collective of weights or of gradients."""

    def __init__(
        self, run: Callable[[Tensor, Tensor], object], allocate: Callable[..., Tensor] = room
    ) -> None:
        self.run, self.allocate = run, allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any = None,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        self.run(output_tensor, input_tensor)


def collective(name: str, group: Group) -> Callable[[Tensor, Tensor], object]:
    return lambda y, x: getattr(dist, name)(y, x, group=group)


def in_float32(group: Group) -> tuple[Way, Way]:
    """As FSDP2 does it by itself: gradients leave in float32."""
    return Way(collective(GATHER, group)), Way(collective(REDUCE, group))


def silent(group: Group) -> tuple[Way, Way]:
    """Nothing leaves, and what others have is taken to be like one's own: how fast it could be."""
    rank, ways = group.rank(), group.size()

    def weights(whole: Tensor, x: Tensor) -> None:
        for part in (part for i, part in enumerate(whole.chunk(ways)) if i != rank):
            part.copy_(x)

    sums = Way(lambda own, x: own.copy_(x.chunk(ways)[rank]), WideSums(ways).allocate)
    return Way(weights), sums


WAYS = {"gradients in float32": in_float32, "nothing sent": silent}


@contextlib.contextmanager
def counted() -> Iterator[dict[str, float]]:
    """MB that leave this process within, by collective."""
    sent: dict[str, float] = {}
    names = [*COLLECTIVES, "batch_isend_irecv"]
    real = {name: getattr(dist, name) for name in names}

    def call(name: str, *given: Any, **named: Any) -> Any:
        lists = (x if isinstance(x, list) else [x] for x in (*given, *named.values()))
        if name in COLLECTIVES:
            whole = max(sum(y.nbytes for y in x if isinstance(y, Tensor)) for x in lists)
            ways = dist.get_world_size(named.get("group"))
            most = COLLECTIVES[name] * whole * (ways - 1) / ways
        else:
            most = sum(x.tensor.nbytes for x in given[0] if x.op is dist.isend)
        sent[name] = round(sent.get(name, 0.0) + most / 1e6, 6)
        return real[name](*given, **named)

    for name in names:
        setattr(dist, name, partial(call, name))
    try:
        yield sent
    finally:
        for name in names:
            setattr(dist, name, real[name])
