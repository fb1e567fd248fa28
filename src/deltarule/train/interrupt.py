"""Ctrl-C, a polite kill and a lost terminal become a flag that the loop reads between two steps."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

# Windows has no hangup.
HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)


class Interrupt:
    """While open, the first SIGINT, SIGTERM or SIGHUP sets `requested`, and SIGTERM also
    `terminated`; the second acts at once.
    """

    def __init__(self) -> None:
        self.requested = self.terminated = False
        self._before: dict[int, Any] = {}
        streams = (stream for stream in (sys.stdout, sys.stderr) if stream.isatty())
        self._screens = [stream.fileno() for stream in streams]

    def __enter__(self) -> Self:
        """Take over the signals; only the main thread may, elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            for number in {signal.SIGINT, signal.SIGTERM, HANGUP}:
                # What nohup has set to be ignored stays so.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP != signal.SIGTERM:
            # To print on a terminal that is gone would fail before all is saved.
            for screen in self._screens:
                os.dup2(os.open(os.devnull, os.O_WRONLY), screen)
        elif self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.terminated = self.terminated or number == signal.SIGTERM
