"""This process among those that torchrun started, and the mesh that they make.

Axes of the mesh, from far to near: `replicate` (whole copies of the weights), `shard` (parts of the
weights), `context` (parts of a sequence), `tensor` (parts of each layer). Near ones send most.
"""

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from deltarule.errors import StalledError, reason
from deltarule.nn.checks import check_least

T = TypeVar("T")
# Seconds for which one that has waited in vain listens to the others.
GIVING_UP_S = 2.0
AXES = ("replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class MeshOptions:
    """How the processes that torchrun starts share the work.

    Of P processes, P / (replicate * context * tensor) share the weights of each copy.

    Args:
        replicate: Whole copies of the weights; each is sharded over the processes of its copy.
        context: Processes that share each sequence; each has a stretch of its tokens.
        tensor: Processes that share each layer; each has some of its heads.
        keep_gathered: Keep a block's weights gathered from its forward to its backward: faster,
            for more memory. "auto" does so if `deltarule plan` finds room for them on this GPU.
        timeout_s: Seconds after which a process that waits for another gives up.

    Raises:
        ValueError: A number of processes is below 1.
    """

    replicate: int = 1
    context: int = 1
    tensor: int = 1
    keep_gathered: Literal["auto", "yes", "no"] = "auto"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_least(self, 1, "replicate", "context", "tensor")

    def shape(self, processes: int) -> tuple[int, int, int, int]:
        """Sizes of the axes of `AXES` for so many processes.

        Raises:
            ValueError: They do not divide the number of processes.
        """
        used = self.replicate * self.context * self.tensor
        if processes % used:
            raise ValueError(
                f"--replicate {self.replicate} x --context {self.context} x --tensor {self.tensor} "
                f"= {used} must divide the {processes} processes that torchrun started"
            )
        return self.replicate, processes // used, self.context, self.tensor


def make_mesh(device: str, options: MeshOptions | None = None) -> DeviceMesh:
    """Lay the processes of a job out by the axes `replicate`, `shard`, `context` and `tensor`.

    Args:
        device: "cpu" or "cuda", where the model is.
        options: Sizes of the axes. None: all processes are shards.

    Returns:
        The mesh that `parallelize` takes.

    Raises:
        ValueError: The sizes do not divide the number of processes.
    """
    shape = (options or MeshOptions()).shape(dist.get_world_size())
    return init_device_mesh(device, shape, mesh_dim_names=AXES)


class World:
    """Rank, size, device and mesh of this process; without torchrun it is alone and sends nothing.

    Args:
        device: Of this process: "cpu", or "cuda" for the GPU of its local rank.
        options: Sizes of the axes of the mesh, and for how long to wait.

    Raises:
        ValueError: The sizes do not divide the number of processes.

    Examples:
        >>> World(torch.device("cpu")).first
        True
    """

    def __init__(self, device: torch.device, options: MeshOptions | None = None) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = device
        self.mesh: DeviceMesh | None = None
        self.store: PrefixStore | None = None
        options = options or MeshOptions()
        options.shape(self.size)
        self.keep_gathered = options.keep_gathered
        self.timeout = datetime.timedelta(seconds=options.timeout_s)
        # How often torchrun has started the processes again.
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if self.size == 1 and not dist.is_torchelastic_launched():
            return
        if device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            self.store = join(device.type, self.timeout, self.attempt)
        self.mesh = make_mesh(device.type, options)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone prints, and writes what is not sharded."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def agree(self, *wishes: bool) -> list[bool]:
        """Whether any process wishes each: one answer for all."""
        if self.size == 1:
            return [*wishes]
        return [count > 0 for count in self.sum(torch.tensor(wishes, dtype=torch.int32)).tolist()]

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Compute JSON on rank 0 and give it to all; an error there is raised on all.

        Raises:
            ValueError: Rank 0 could not; the message is its own.
        """
        value = self.everywhere(lambda: compute() if self.first else None)
        return value if self.size == 1 else json.loads(broadcast(json.dumps(value)))

    @contextlib.contextmanager
    def attended(self, step: int) -> Iterator[None]:
        """Within a step, a `StalledError` says which process the others wait for in vain."""
        if self.store is not None:
            self.store.set(f"step-{self.rank}", str(step))
        try:
            yield
        except RuntimeError as error:
            if self.store is None or "timed out" not in str(error).lower():
                raise
            # All that wait give up at about the same time, and say so; who hangs says nothing.
            self.store.set(f"waits-{self.rank}", "")
            time.sleep(GIVING_UP_S)
            steps = [int(self.store.get(f"step-{rank}")) for rank in range(self.size)]
            silent = [r for r in range(self.size) if not self.store.check([f"waits-{r}"])]
            behind = silent or [r for r in range(self.size) if steps[r] == min(steps)]
            names = ", ".join(f"{r} (in step {steps[r] + 1})" for r in behind)
            waited = f"for {self.timeout.total_seconds():g} s, while others are in step"
            first = min((r for r in range(self.size) if r not in behind), default=self.rank)
            reason = f"no word from process {names} {waited} {max(steps) + 1}"
            raise StalledError(reason, self.rank == first) from error

    def everywhere(self, compute: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """Compute on every process; an error on any of them is raised on all, told by the group.

        Raises:
            ValueError: Some process could not; the message is that of the first of them, and names
                it unless it is rank 0.
        """
        if self.size == 1:
            return compute()
        failure, value = "", None
        try:
            value = compute()
        except (ValueError, OSError) as error:
            said = reason(error) if isinstance(error, OSError) else str(error)
            failure = said or type(error).__name__
        failed = torch.zeros(self.size, dtype=torch.int32)
        failed[self.rank] = bool(failure)
        dist.all_reduce(failed, group=group)
        if failed.any():
            rank = int(failed.argmax())
            told = broadcast(failure, rank, group)
            raise ValueError(f"process {rank}: {told}" if rank else told)
        return cast(T, value)


def join(device: str, timeout: datetime.timedelta, attempt: int) -> PrefixStore:
    """Meet the other processes that torchrun started; return what they can leave notes in.

    Where some have not started in time, a `StalledError` names them.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = None
    try:
        store, *_ = next(rendezvous("env://", timeout=timeout))
        # torchrun's store outlives a restart, with the addresses of those that are dead by then.
        store = PrefixStore(f"attempt-{attempt}", store)
        store.set(f"here-{rank}", "")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store, rank=rank, world_size=size, timeout=timeout,
        )  # fmt: skip
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        # Without a store it is process 0 that all others wait for, or 0 itself that waits.
        here = {0} if rank == 0 else set(range(1, size))
        if store is not None:
            here = {r for r in range(size) if store.check([f"here-{r}"])}
        late = ", ".join(str(r) for r in range(size) if r not in here)
        reason = f"process {late} has not started within {timeout.total_seconds():g} s"
        raise StalledError(reason, rank == min(here)) from error
    return store


def broadcast(text: str, source: int = 0, group: dist.ProcessGroup | None = None) -> str:
    """Give all processes the text of one, as bytes: no object is pickled on the way."""
    data = text.encode()
    size = torch.tensor([len(data)])
    dist.broadcast(size, source, group)
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == source:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, source, group)
    return bytes(buffer.tolist()).decode()
