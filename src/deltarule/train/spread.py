"""What the training loop leaves to the processes of a run, and what they must agree on.

A step is a function of the seed and the step alone: it has `accumulate` rows whatever the number
of processes, group r of D takes the rows r, r + D, ..., and their losses and gradients are summed.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from deltarule.models import CausalLM
from deltarule.parallel import World, parallelize
from deltarule.parallel.estimate import Division, room_to_keep
from deltarule.parallel.machine import Size
from deltarule.parallel.spread import Plan
from deltarule.parallel.world import AXES
from deltarule.train.checkpoint import Checkpoints


class Spread:
    """A model on the processes of a run, spread in place; on one process, or by None, nothing is.

    Of the `count` rows of a step, which all processes share out evenly, `rows` are this one's. A
    pass takes rows of `tokens` at once.
    """

    def __init__(
        self,
        model: CausalLM,
        world: World | None,
        *,
        bfloat16: bool,
        count: int = 1,
        tokens: int = 0,
    ) -> None:
        self.model, self.world, self.count, self.rows = model, world, count, range(count)
        self.plan: Plan | None = None
        # Processes that share layers measure the same.
        self.alike = 1
        if world is not None and world.size > 1 and (mesh := world.mesh) is not None:
            keep = keeps_gathered(model, world, mesh, tokens, 2 if bfloat16 else 4)
            shards = mesh["shard"].size()
            groups = mesh["replicate"].size() * shards
            if count % groups:
                raise ValueError(
                    f"--accumulate {count} rows cannot be shared out over {groups} groups of "
                    f"processes: give a multiple of {groups}, or let processes share rows, by "
                    "--context or --tensor"
                )
            own = mesh["replicate"].get_local_rank() * shards + mesh["shard"].get_local_rank()
            self.rows = range(own, count, groups)
            self.plan = parallelize(
                model, mesh, bfloat16=bfloat16, keep_gathered=keep, accumulates=len(self.rows) > 1
            )
            self.alike = mesh["tensor"].size()
        self.data = None if self.plan is None else self.plan.data
        # What a pass without gradients needs around it: gathered weights may be in bfloat16.
        kind = next(model.parameters()).device.type
        low = bfloat16 and self.data is not None
        self.autocast = torch.autocast(kind, torch.bfloat16, enabled=low)

    def checkpoints(self, folder: Path, keep: int) -> Checkpoints:
        """Of the run: by one process whole files, by several parts; each reads both."""
        if self.plan is None or self.world is None:
            return Checkpoints(folder, keep=keep)
        # DTensor and its checkpoints take a second to import, and one process needs neither.
        from deltarule.train.sharded_checkpoint import ShardedCheckpoints

        stepped = self.plan.stepped
        return ShardedCheckpoints(folder, keep=keep, world=self.world, stepped=stepped)

    def before_backward(self, last: bool) -> None:
        """Let the gradients of the last row, and with them of all before it, be summed."""
        if self.data is not None:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def summed(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """The figures of all rows, and the norm of the whole gradient, once all of it is summed."""
        from deltarule.parallel.sharding import sharded_norm, sum_replicated

        if self.world is not None:
            total = self.world.sum(total) / self.alike
        if self.plan is not None and self.data is not None:
            sum_replicated(self.plan.replicated, self.data)
        return total, sharded_norm([p.grad for p in self.model.parameters() if p.grad is not None])


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
