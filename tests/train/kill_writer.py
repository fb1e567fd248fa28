"""Kill a process that saves checkpoints, again and again, and read the newest one each time.

Run as a program: `python kill_writer.py FOLDER KILLS SEED`. It forks, so that a kill costs
milliseconds and not an import of PyTorch.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from deltarule.train.checkpoint import Checkpoints, read_checkpoint


def content(step: int) -> dict[str, torch.Tensor]:
    """Tensors that betray their step, and any mixture of two steps."""
    whole = torch.full((40_000,), float(step))
    return {"a": whole, "b": torch.tensor([step]), "exp_avg/a": -whole}


def write_for_ever(folder: Path, first: int) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    step = first
    while True:
        step += 1
        checkpoints.save(step, content(step), {"step": step})


def read_back(folder: Path, least: int) -> int:
    """The newest step, after checking that it is whole and not older than what was seen before."""
    checkpoints = Checkpoints(folder, keep=2)
    assert not list(folder.glob(".*")), "what a killed writer left is cleaned at start"
    for visible in folder.glob("step-*"):
        read_checkpoint(visible)
    newest = checkpoints.newest()
    if newest is None:
        assert least == 0
        return 0
    assert newest.step >= least
    assert newest.state == {"step": newest.step}
    for name, tensor in content(newest.step).items():
        assert torch.equal(newest.tensors[name], tensor)
    return newest.step


def main(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    torch.set_num_threads(1)
    step, advanced = 0, 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            write_for_ever(folder, step)
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        before, step = step, read_back(folder, step)
        advanced += step > before
    # Kills that always came before the first save would prove nothing.
    assert advanced > kills / 4, f"only {advanced} of {kills} writers got anything done"
    print(f"{kills} kills, newest step {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
