"""How a run comes to an end before its last step, as the command line tells it."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

# What a shell reports after Ctrl-C.
INTERRUPTED = 130
STANDARD_ERROR = 2


def reason(error: BaseException) -> str:
    """What an error says in one line; of a file's, its path and what is wrong with it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within it, where nothing is done but importing, Ctrl-C ends the process with one line.

    Importing PyTorch and numpy, C code loses a KeyboardInterrupt and goes on without a module.
    """

    def end(*_: object) -> None:
        os.write(STANDARD_ERROR, b"deltarule: stopped\n")
        os._exit(INTERRUPTED)

    # What someone else has put there, or nohup, stays.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
