"""The checkpoints of a run: its weights and moments by name, and where its next step starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltarule.train.checkpoint import Checkpoints, Tensors
from deltarule.train.spread import Spread

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class RunCheckpoints:
    """What the training loop saves itself to, and goes on from."""

    files: Checkpoints
    """By one process whole files, by several parts; each reads both."""
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint, or begin to: `files.wait` says when it is there."""
        self.files.save(step, self.weights_and_moments(), state)

    def restore(self) -> tuple[int, dict[str, Any]] | None:
        """Fill model and optimizer from the newest; return its step and state, None without one."""
        newest = self.files.newest()
        if newest is None:
            return None
        self.files.fill(newest, self.weights_and_moments())
        for moments in self.optimizer.state.values():
            moments["step"].fill_(newest.step)
        return newest.step, newest.state

    def load_weights(self, step: int) -> None:
        self.files.fill(self.files.weights_of(step), self.weights())

    def weights(self) -> Tensors:
        return dict(self.model.state_dict())

    def weights_and_moments(self) -> Tensors:
        """The same and `exp_avg/NAME` and so on, split as they are.

        An optimizer that has not stepped gets moments of zero: they are there to be filled.
        """
        found = self.weights()
        for name, parameter in self.model.named_parameters():
            state: dict[str, Tensor] = self.optimizer.state[parameter]
            if not state:
                state.update({kind: torch.zeros_like(parameter) for kind in MOMENTS})
                state["step"] = torch.tensor(0.0, device=parameter.device)
            found |= {f"{kind}/{name}": state[kind] for kind in MOMENTS}
        return found


def make_checkpoints(
    folder: Path, keep: int, spread: Spread, optimizer: torch.optim.Optimizer
) -> RunCheckpoints:
    """The checkpoints of this process's run, of the model that is spread and its optimizer."""
    if spread.plan is None or spread.world is None:
        return RunCheckpoints(Checkpoints(folder, keep=keep), spread.model, optimizer)
    # DTensor and its checkpoints take a second to import, and one process needs neither.
    from deltarule.train.sharded_checkpoint import ShardedCheckpoints

    stepped = spread.plan.stepped
    files = ShardedCheckpoints(folder, keep=keep, world=spread.world, stepped=stepped)
    return RunCheckpoints(files, spread.model, optimizer)
