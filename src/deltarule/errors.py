"""How a run comes to an end before its last step, as the command line tells it."""

from pathlib import Path

# What a shell reports after Ctrl-C.
INTERRUPTED = 130


class DivergedError(RuntimeError):
    """The loss or the gradient is nan or infinite; the message names the step."""


class StoppedRunError(RuntimeError):
    """The run in `folder` has ended early, and can go on; `code` is what the process exits with."""

    def __init__(self, reason: str, folder: Path, code: int = 1) -> None:
        """Say why."""
        super().__init__(reason)
        self.folder, self.code = folder, code


class StalledError(RuntimeError):
    """Some process has not come where the others wait for it; the message names it.

    Attributes:
        speaks: Whether this is the one of the waiting processes that should say so.
    """

    def __init__(self, rank: int, behind: list[int], steps: list[int], seconds: float) -> None:
        """Name those that are behind."""
        names = ", ".join(f"{r} (in step {steps[r] + 1})" for r in behind)
        super().__init__(
            f"no word from process {names} for {seconds:g} s, while others are in step "
            f"{max(steps) + 1}; --timeout-s sets how long to wait"
        )
        waiting = [r for r in range(len(steps)) if r not in behind]
        self.speaks = rank == min(waiting, default=rank)
