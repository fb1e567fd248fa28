"""Ways for the weights and gradients of blocks to travel, to be timed beside the library's own.

A kernel of NCCL takes multiprocessors from the products beside it, copy engines take none.
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


def by_library(group: Group) -> tuple[Way, Way]:
    """As the library does it: gradients leave in bfloat16 and are summed in float32."""
    wide = WideSums(group.size())
    sums = Way(lambda own, x: wide(own, x, group, None), wide.allocate)
    return Way(collective(GATHER, group)), sums


def in_float32(group: Group) -> tuple[Way, Way]:
    """As FSDP2 does it by itself: gradients leave in float32."""
    return Way(collective(GATHER, group)), Way(collective(REDUCE, group))


def by_few(group: Group) -> tuple[Way, Way]:
    """The library's collectives by kernels that take at most 8 multiprocessors."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 8
    ranks = dist.get_process_group_ranks(group)
    return by_library(dist.new_group(ranks, backend="nccl", pg_options=options))


def silent(group: Group) -> tuple[Way, Way]:
    """Nothing leaves, and what others have is taken to be like one's own: how fast it could be."""
    rank, ways = group.rank(), group.size()

    def weights(whole: Tensor, x: Tensor) -> None:
        for part in (part for i, part in enumerate(whole.chunk(ways)) if i != rank):
            part.copy_(x)

    sums = Way(lambda own, x: own.copy_(x.chunk(ways)[rank]), WideSums(ways).allocate)
    return Way(weights), sums


def by_copy_engines(group: Group) -> tuple[Way, Way]:
    """The same numbers fetched from memory that the GPUs of a host share, by no kernel."""
    from torch.distributed import _symmetric_memory as shared

    rank, ways, wide = group.rank(), group.size(), WideSums(group.size())
    kept: dict[Any, list[Tensor]] = {}
    handles: dict[int, Any] = {}

    def take(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (key := (*size, dtype)) not in kept:
            kept[key] = [shared.empty(*size, dtype=dtype, device=device) for _ in range(2)]
            handles.update({x.data_ptr(): shared.rendezvous(x, group) for x in kept[key]})
        # Two in turns: the other one may still be read.
        kept[key].reverse()
        return kept[key][0]

    @contextlib.contextmanager
    def all_parts(x: Tensor) -> Iterator[list[tuple[Tensor, ...]]]:
        """Every process's buffer in parts, while nobody changes one."""
        handle = handles[x.data_ptr()]
        handle.barrier(channel=0)
        there = (x if i == rank else handle.get_buffer(i, x.shape, x.dtype) for i in range(ways))
        yield [y.chunk(ways) for y in there]
        handle.barrier(channel=1)

    def weights(whole: Tensor, x: Tensor) -> None:
        with all_parts(whole) as parts:
            for i in (i for i in range(ways) if i != rank):
                parts[rank][i].copy_(parts[i][i])

    def sums(own: Tensor, x: Tensor) -> None:
        came = torch.empty_like(x)
        with all_parts(x) as parts:
            for part, theirs in zip(came.chunk(ways), parts, strict=True):
                part.copy_(theirs[rank])
        torch.sum(came.view(ways, -1), 0, dtype=own.dtype, out=own)

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = wide.allocate(size, dtype=dtype, device=device)
        return x if x.dtype == dtype else take(size, dtype=x.dtype, device=device)

    # Where it does not work it fails here.
    take((64,), dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    return Way(weights, take), Way(sums, allocate)


WAYS = {
    "by the library": by_library, "gradients in float32": in_float32, "8 multiprocessors": by_few,
    "copy engines": by_copy_engines, "nothing sent": silent,
}  # fmt: skip


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
