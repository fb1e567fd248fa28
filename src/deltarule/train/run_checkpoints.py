"""The checkpoints of a run, by one process as whole files, by several as parts; each reads both."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from deltarule.models.files import naming
from deltarule.train.checkpoint import Checkpoints, read_checkpoint
from deltarule.train.optimizer import load_optimizer_tensors, optimizer_tensors
from deltarule.train.spread import Spread

if TYPE_CHECKING:
    from deltarule.train.sharded_checkpoint import ShardedCheckpoints

State = dict[str, Any]
MOMENTS = ("exp_avg", "exp_avg_sq")


class RunCheckpoints(Protocol):
    """What the training loop saves itself to."""

    def write(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        state: State,
    ) -> None:
        """Write a checkpoint, or begin to."""  # fmt: skip

    def wait(self) -> None:
        """Wait until what was begun is on disk."""

    def steps(self) -> list[int]:
        """Steps that are there."""

    def spare(self, step: int) -> None:
        """Keep a step whatever comes after it."""

    def load_weights(self, step: int, model: nn.Module) -> None:
        """Give a model the weights of a step."""

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]
    ) -> tuple[int, State] | None:
        """Fill model and optimizer from the newest; return its step and state, None without one."""


def make_checkpoints(folder: Path, keep: int, spread: Spread) -> RunCheckpoints:
    """The checkpoints of this process's run."""
    if spread.plan is None or spread.world is None:
        return Whole(Checkpoints(folder, keep=keep))
    # It imports a second's worth of DTensor and checkpoints, which a run on one process needs not.
    from deltarule.train.sharded_checkpoint import ShardedCheckpoints

    stepped = spread.plan.stepped
    return Parts(ShardedCheckpoints(folder, keep=keep, world=spread.world, stepped=stepped))


class Whole:
    """Of a run on one process."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        """Write to these."""
        self.checkpoints = checkpoints

    def write(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        state: State,
    ) -> None:
        """Model and optimizer, a file each."""
        tensors = {
            "model": dict(model.state_dict()),
            "optimizer": optimizer_tensors(optimizer, names),
        }
        self.checkpoints.save(step, tensors, state)  # fmt: skip

    def wait(self) -> None:
        """Nothing is left to do."""

    def steps(self) -> list[int]:
        """Steps that are there."""
        return self.checkpoints.steps()

    def spare(self, step: int) -> None:
        """Keep it."""
        self.checkpoints.spared = step

    def load_weights(self, step: int, model: nn.Module) -> None:
        """From whole files."""
        folder = self.checkpoints.folder / f"step-{step}"
        with naming(folder):
            tensors = read_checkpoint(folder, optimizer=False).tensors
            if "model" in tensors:
                model.load_state_dict(tensors["model"])
            else:
                read_parts(folder, dict(model.state_dict()))

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]
    ) -> tuple[int, State] | None:
        """From whole files, or from the parts that several processes wrote."""
        newest = self.checkpoints.newest()
        if newest is None:
            return None
        folder = self.checkpoints.folder / f"step-{newest.step}"
        if newest.tensors.keys() == {"model", "optimizer"}:
            with naming(folder):
                model.load_state_dict(newest.tensors["model"])
            load_optimizer_tensors(optimizer, names, newest.tensors["optimizer"])
        else:
            read_parts(folder, named_tensors(model, optimizer, names))
            count_steps(optimizer, newest.step)
        return newest.step, newest.state


class Parts:
    """Of a run on several processes."""

    def __init__(self, checkpoints: "ShardedCheckpoints") -> None:
        """Write to these."""
        self.checkpoints = checkpoints

    def write(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        state: State,
    ) -> None:
        """What each process holds, beside the next steps."""
        self.checkpoints.save(step, named_tensors(model, optimizer, names), state)  # fmt: skip

    def wait(self) -> None:
        """Until all is on disk."""
        self.checkpoints.wait()

    def steps(self) -> list[int]:
        """Steps that are there, on the first process."""
        return self.checkpoints.steps()

    def spare(self, step: int) -> None:
        """Keep it; the first process removes."""
        if self.checkpoints.plain is not None:
            self.checkpoints.plain.spared = step

    def load_weights(self, step: int, model: nn.Module) -> None:
        """What each process holds of them."""
        folder = self.checkpoints.folder / f"step-{step}"
        self.checkpoints.read(folder, dict(model.state_dict()))

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]
    ) -> tuple[int, State] | None:
        """What each process holds, whoever wrote it."""
        folder = self.checkpoints.newest()
        if folder is None:
            return None
        state = self.checkpoints.read(folder, named_tensors(model, optimizer, names))
        step = int(folder.name.removeprefix("step-"))
        count_steps(optimizer, step)
        return step, state


def read_parts(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors from the files of several processes."""
    from deltarule.parallel.shard_files import read_shards

    read_shards(folder, tensors)


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]
) -> dict[str, Tensor]:
    """Weights and moments under their names in a checkpoint, split as they are.

    An optimizer that has not stepped gets moments of zero: they are there to be filled.
    """
    found: dict[str, Tensor] = dict(model.state_dict())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        state = optimizer.state[parameter]
        if not state:
            state.update({kind: torch.zeros_like(parameter) for kind in MOMENTS})
            state["step"] = torch.tensor(0.0, device=parameter.device)
        found |= {f"{kind}/{name}": state[kind] for kind in MOMENTS}
    return found


def count_steps(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Tell the optimizer how many steps it has taken."""
    for state in optimizer.state.values():
        state["step"].fill_(step)
