"""Ctrl-C and a polite kill become a flag that the loop reads between two steps."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """While open, the first SIGINT or SIGTERM sets `requested`, and SIGTERM also `terminated`; the
    second acts at once.

    Examples:
        >>> with Interrupt() as interrupt:
        ...     interrupt.requested
        False
    """

    def __init__(self) -> None:
        """Nothing is requested yet."""
        self.requested = self.terminated = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        """Take over the signals; only the main thread may, elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested, self.terminated = True, number == signal.SIGTERM
