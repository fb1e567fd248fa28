"""The checkpoints of a run, by one process as whole files, by several as parts; each reads both."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deltarule.models.files import naming
from deltarule.train.checkpoint import Checkpoints, fill, read_checkpoint, read_parts, step_of
from deltarule.train.optimizer import load_optimizer_tensors, optimizer_tensors
from deltarule.train.spread import Spread

if TYPE_CHECKING:
    from deltarule.train.sharded_checkpoint import ShardedCheckpoints

State = dict[str, Any]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class RunCheckpoints(ABC):
    """What the training loop saves itself to, and goes on from."""

    checkpoints: "Checkpoints | ShardedCheckpoints"
    model: nn.Module
    optimizer: torch.optim.Optimizer
    names: list[str]
    """Of the optimizer's parameters, in its own order."""

    def steps(self) -> list[int]:
        """Steps that are there, on the first process."""
        return self.checkpoints.steps()

    def folder(self, step: int) -> Path:
        return self.checkpoints.folder / f"step-{step}"

    @abstractmethod
    def write(self, step: int, state: State) -> None:
        """Write a checkpoint, or begin to."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until what was begun is on disk."""

    @abstractmethod
    def spare(self, step: int) -> None:
        """Keep a step whatever comes after it."""

    @abstractmethod
    def load_weights(self, step: int) -> None:
        """Give the model the weights of a step."""

    @abstractmethod
    def restore(self) -> tuple[int, State] | None:
        """Fill model and optimizer from the newest; return its step and state, None without one."""

    def weights(self) -> dict[str, Tensor]:
        """Under their names in a checkpoint."""
        return dict(self.model.state_dict())

    def weights_and_moments(self) -> dict[str, Tensor]:
        """Under their names in a checkpoint, split as they are.

        An optimizer that has not stepped gets moments of zero: they are there to be filled.
        """
        found = self.weights()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for name, parameter in zip(self.names, parameters, strict=True):
            state = self.optimizer.state[parameter]
            if not state:
                state.update({kind: torch.zeros_like(parameter) for kind in MOMENTS})
                state["step"] = torch.tensor(0.0, device=parameter.device)
            found |= {f"{kind}/{name}": state[kind] for kind in MOMENTS}
        return found

    def count_steps(self, step: int) -> None:
        """Tell the optimizer how many steps it has taken."""
        for state in self.optimizer.state.values():
            state["step"].fill_(step)


@dataclass
class Whole(RunCheckpoints):
    """Of a run on one process: model and optimizer, a file each."""

    checkpoints: Checkpoints

    def write(self, step: int, state: State) -> None:
        """Both files; then it is on disk."""
        moments = optimizer_tensors(self.optimizer, self.names)
        self.checkpoints.save(step, {"model": self.weights(), "optimizer": moments}, state)

    def wait(self) -> None:
        """Nothing is left to do."""

    def spare(self, step: int) -> None:
        self.checkpoints.spared = step

    def load_weights(self, step: int) -> None:
        """From the model's file, or from the parts that several processes wrote."""
        folder = self.folder(step)
        with naming(folder):
            fill(self.model, folder, read_checkpoint(folder, optimizer=False).tensors)

    def restore(self) -> tuple[int, State] | None:
        """From both files, or from the parts that several processes wrote."""
        newest = self.checkpoints.newest()
        if newest is None:
            return None
        folder = self.folder(newest.step)
        if newest.tensors.keys() == {"model", "optimizer"}:
            with naming(folder):
                self.model.load_state_dict(newest.tensors["model"])
            load_optimizer_tensors(self.optimizer, self.names, newest.tensors["optimizer"])
        else:
            read_parts(folder, self.weights_and_moments())
            self.count_steps(newest.step)
        return newest.step, newest.state


@dataclass
class Parts(RunCheckpoints):
    """Of a run on several processes: what each holds, whoever wrote it."""

    checkpoints: "ShardedCheckpoints"

    def write(self, step: int, state: State) -> None:
        """Begin to, beside the next steps."""
        self.checkpoints.save(step, self.weights_and_moments(), state)

    def wait(self) -> None:
        self.checkpoints.wait()

    def spare(self, step: int) -> None:
        """Keep it; the first process removes."""
        if self.checkpoints.plain is not None:
            self.checkpoints.plain.spared = step

    def load_weights(self, step: int) -> None:
        """What this process holds of them."""
        self.checkpoints.read(self.folder(step), self.weights())

    def restore(self) -> tuple[int, State] | None:
        """What this process holds."""
        folder = self.checkpoints.newest()
        if folder is None:
            return None
        state, step = self.checkpoints.read(folder, self.weights_and_moments()), step_of(folder)
        self.count_steps(step)
        return step, state


def make_checkpoints(
    folder: Path,
    keep: int,
    spread: Spread,
    optimizer: torch.optim.Optimizer,
    names: list[str],
) -> RunCheckpoints:
    """The checkpoints of this process's run, of the model that is spread and its optimizer."""
    model = spread.model
    if spread.plan is None or spread.world is None:
        return Whole(Checkpoints(folder, keep=keep), model, optimizer, names)
    # A run on one process does not need DTensor and its checkpoints, which take a second to import.
    from deltarule.train.sharded_checkpoint import ShardedCheckpoints

    stepped = spread.plan.stepped
    parts = ShardedCheckpoints(folder, keep=keep, world=spread.world, stepped=stepped)
    return Parts(parts, model, optimizer, names)
