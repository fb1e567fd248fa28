"""An experiment of cells that take no time, for processes that tests start.

Its words and settings lie in the folder `settings`.
"""

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.figures import Curve, Panel, draw_curves


@dataclass(frozen=True)
class Tiny:
    """Does what its name says."""

    name: str
    seed: int = 7
    steps: int = 3
    waits: bool = False

    def run(self, folder: Path, device):
        """One line a step into `steps`, which a second run goes on with.

        A cell that waits does its last step only once there is a file `go`.
        """
        if self.name == "fails":
            raise RuntimeError("it was to fail")
        if self.name == "dies":
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == "full-disk":
            raise OSError(errno.ENOSPC, "No space left on device", "a file")
        if self.name == "big":
            return {"score": 1.0, "list": list(range(100_000))}
        log = folder / "steps"
        done = len(log.read_text().splitlines()) if log.exists() else 0
        for step in range(done, self.steps):
            while self.waits and step == self.steps - 1 and not Path("go").exists():
                time.sleep(0.05)
            with log.open("a") as file:
                file.write(f"{step} {os.getpid()}\n")
        return {"score": float("nan") if self.name == "nan" else float(self.steps)}


CELLS = [Tiny("a"), Tiny("b")]


def cells(form):
    """What a test asks for."""
    return list(CELLS)


def draw(form, results):
    """One curve."""
    scores = [result.figures["score"] for result in results]
    curve = Curve("score", dict(enumerate(scores)))
    return draw_curves([Panel([curve], "x", "y")], title="t")


def table(form, results):
    """Names and scores."""
    return "\n".join(f"{result.name} {result.figures['score']}" for result in results)
