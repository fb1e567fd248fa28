"""What the training loop leaves to the processes of a run, and what they must agree on.

A step is a function of the seed and the step alone: it has `accumulate` rows whatever the number
of processes, group r of D takes the rows r, r + D, ..., and their losses and gradients are summed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from deltarule.models import CausalLM
from deltarule.parallel import World, parallelize
from deltarule.parallel.estimate import Division, room_to_keep
from deltarule.parallel.machine import Size
from deltarule.parallel.spread import Plan
from deltarule.parallel.world import AXES
from deltarule.train.step import Part, TrainingStep


class Spread:
    """A model on the processes of a run; on one process nothing is spread.

    Args:
        model: Spread in place.
        world: The processes. None: this one alone.
        bfloat16: Whether the model computes under autocast.
        tokens: Of the rows that a pass takes at once.

    Raises:
        ValueError: The model cannot be split so.
    """

    def __init__(
        self, model: CausalLM, world: World | None, *, bfloat16: bool, tokens: int = 0
    ) -> None:
        self.model, self.world, self.bfloat16 = model, world, bfloat16
        self.plan: Plan | None = None
        if world is not None and world.mesh is not None and world.size > 1:
            keep = keeps_gathered(model, world, world.mesh, tokens, 2 if bfloat16 else 4)
            self.plan = parallelize(model, world.mesh, bfloat16=bfloat16, keep_gathered=keep)

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.world is None or self.world.first

    def rows(self, count: int) -> range:
        """Which of the rows of a step are this process's.

        Raises:
            ValueError: They cannot be shared out evenly.
        """
        if self.plan is None or self.world is None or self.world.mesh is None:
            return range(count)
        mesh = self.world.mesh
        shards = mesh["shard"].size()
        groups = mesh["replicate"].size() * shards
        if count % groups:
            raise ValueError(
                f"--accumulate {count} rows cannot be shared out over {groups} groups of "
                f"processes: give a multiple of {groups}"
            )
        own = mesh["replicate"].get_local_rank() * shards + mesh["shard"].get_local_rank()
        return range(own, count, groups)

    def before_backward(self, last: bool) -> None:
        """Let the gradients of the last row, and with them of all before it, be summed."""
        if self.plan is not None and self.plan.data is not None:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def autocast(self, device: torch.device) -> torch.autocast:
        """What a pass without gradients needs around it."""
        gathered = self.plan is not None and self.plan.data is not None
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bfloat16 and gathered)

    def total(self, figures: Tensor) -> Tensor:
        """Sums of what each process has measured on its share of the rows."""
        if self.plan is None or self.world is None or self.world.mesh is None:
            return figures
        # Processes that share layers have measured the same.
        return self.world.sum(figures) / self.world.mesh["tensor"].size()

    def clip(self, largest: float) -> Tensor:
        """Clip by the norm of the whole gradient, which is spread; return it."""
        from deltarule.parallel.sharding import clip_sharded, sum_replicated

        if self.plan is not None and self.plan.data is not None:
            sum_replicated(self.plan.replicated, self.plan.data)
        return clip_sharded(list(self.model.parameters()), largest)

    @contextlib.contextmanager
    def attended(self, step: int) -> Iterator[None]:
        """Within a step, who waits in vain for another process says for which.

        Raises:
            StalledError: A process has not come in time.
        """
        if self.world is None:
            yield
            return
        self.world.beat(step)
        try:
            yield
        except RuntimeError as error:
            if (stalled := self.world.stalled(error)) is None:
                raise
            raise stalled from error

    def agree(self, *wishes: bool) -> list[bool]:
        """Whether any process wishes each: one answer for all, who then stop at one step."""
        if self.plan is None or self.world is None:
            return list(wishes)
        return [count > 0 for count in self.world.sum(torch.tensor(wishes, dtype=torch.int32))]


def keeps_gathered(model: CausalLM, world: World, mesh: DeviceMesh, tokens: int, each: int) -> bool:
    """Whether gathered weights, so many bytes each, stay until the backward: alike everywhere."""
    if world.keep_gathered != "auto":
        return world.keep_gathered == "yes"
    if world.device.type != "cuda":
        return False
    config, sizes = model.config, {name: mesh[name].size() for name in AXES}
    division = Division(**sizes, checkpointing=model.activation_checkpointing)
    size = Size(len(config.layer_types), config.hidden_size, config.vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    total = torch.cuda.get_device_properties(world.device).total_memory
    here = room_to_keep(size, parameters, division, tokens / division.context, total, each)
    return int(world.sum(torch.tensor(int(here)))) == world.size


class SpreadStep(TrainingStep):
    """A `TrainingStep` on this process's share of the rows of the whole step."""

    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        spread: Spread,
        rows: int,
        clip: float,
    ) -> None:
        """Take eager steps: collectives of a hanging process must be able to time out."""
        super().__init__(loss, optimizer, clip=clip, cuda_graphs=False)
        self.spread, self.rows = spread, rows

    def count(self, parts: Sequence[Part]) -> int:
        return self.rows

    def before_backward(self, last: bool) -> None:
        """Gradients are summed once a step."""
        self.spread.before_backward(last)

    def summed(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over all processes; the gradient is clipped."""
        return self.spread.total(total), self.spread.clip(self.clip).reshape(1)

    def divisor(self, norm: Tensor) -> None:
        """None: a fused optimizer divides no gradients that are spread over a mesh."""
