"""How a run comes to an end before its last step, as the command line tells it."""

from pathlib import Path

# What a shell reports after Ctrl-C.
INTERRUPTED = 130


class DivergedError(RuntimeError):
    """The loss or the gradient is nan or infinite; the message names the step."""


class StoppedRunError(RuntimeError):
    """The run in `folder` has ended early, and can go on; `code` is what the process exits with."""

    def __init__(self, reason: str, folder: Path, code: int = 1) -> None:
        super().__init__(reason)
        self.folder, self.code = folder, code


class StalledError(RuntimeError):
    """Some process has not come where the others wait for it; the message names it.

    Attributes:
        speaks: Whether this is the one of the waiting processes that should say so.
    """

    def __init__(self, reason: str, speaks: bool) -> None:
        super().__init__(f"{reason}; --timeout-s sets how long to wait")
        self.speaks = speaks
