"""How a run shows itself: a live bar on a terminal, plain lines everywhere else."""

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

from deltarule.train.extra import require

T = TypeVar("T")
# Seconds between the lines of a run whose output goes to a file.
LINE_EVERY = 10.0
STEP, PERCENT = "step", 100
CONTROLS = {n: rf"\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"}
# Columns of a terminal that has room for a bar beside the figures.
WIDE = 80


class Progress:
    """What the loop tells about itself; told to nobody, as beside the process that tells."""

    def update(self, step: int, shown: dict[str, str]) -> None:
        """One step is done; `shown` are the figures of the moment by their names."""

    def update_bytes(self, done: int, total: int, more: dict[str, str] | None = None) -> None:
        """So many of all bytes are done; the bar is one of `PERCENT` steps."""
        shown = {"GB": f"{done / 1e9:.2f} of {total / 1e9:.2f}"} | (more or {})
        self.update(PERCENT * done // max(total, 1), shown)

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop; the last figures stay."""


def make_progress(steps: int, *, first: int = 0, quiet: bool = False, what: str = STEP) -> Progress:
    """A live bar when standard output is a terminal that can draw one, else plain lines.

    Of anything but steps of training nothing stays in the end.
    """
    if quiet:
        return Progress()
    if sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return LiveProgress(steps, first, what)
    return PlainProgress(steps, first, what)


def followed(
    items: Iterable[T], total: int, size: Callable[[T], int], what: str | None
) -> Iterator[T]:
    """Pass items on, with a bar that their sizes fill; None shows nothing."""
    done = 0
    with make_progress(total, quiet=what is None, what=what or STEP) as bar:
        for item in items:
            yield item
            done += size(item)
            bar.update(done, {})


def for_screen(text: str) -> str:
    """Lines broken at the width of the terminal; as they are where output goes elsewhere."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.splitlines():
        further = " " * (len(line) - len(line.lstrip()) + 4)
        lines += textwrap.wrap(
            line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def as_shown(text: str) -> str:
    """Text of a model or a file, whose control characters must not reach a terminal."""
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


class PlainProgress(Progress):
    """A line at the first step, every ten seconds, and at the last step; of others, the second."""

    def __init__(self, steps: int, first: int = 0, what: str = STEP) -> None:
        self.steps, self.first, self.what = steps, first, what
        self._began = self._last = time.monotonic()
        self._line = ""

    def update(self, step: int, shown: dict[str, str]) -> None:
        now = time.monotonic()
        left = (now - self._began) / max(1, step - self.first) * (self.steps - step)
        figures = "  ".join(f"{name} {value}" for name, value in shown.items())
        parts = [f"{self.what} {step:,}/{self.steps:,}", figures, f"left {clock(left)}"]
        self._line = "  ".join(filter(None, parts))
        ends = self.what == STEP and step in (self.first + 1, self.steps)
        if ends or now - self._last >= LINE_EVERY:
            self.note(self._line)
            self._last, self._line = now, ""

    def note(self, text: str) -> None:
        print(for_screen(text), flush=True)

    def __exit__(self, *_: object) -> None:
        if self._line and self.what == STEP:
            self.note(self._line)


class LiveProgress(Progress):
    """A bar with the figures, redrawn in place by rich."""

    def __init__(self, steps: int, first: int = 0, what: str = STEP) -> None:
        progress = require("rich.progress")
        # Where there is no room for both, figures are worth more than a bar.
        wide = shutil.get_terminal_size().columns >= WIDE or what != STEP
        self._bar = progress.Progress(
            *([progress.BarColumn(bar_width=None)] if wide else []),
            progress.TextColumn(what + " {task.completed:,.0f}/{task.total:,.0f}"),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            expand=wide, transient=what != STEP,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=steps, completed=first, figures="")

    def update(self, step: int, shown: dict[str, str]) -> None:
        figures = "  ".join(f"{name} [bold]{value}[/bold]" for name, value in shown.items())
        self._bar.update(self._task, completed=step, figures=figures)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    Examples:
        >>> clock(125), clock(3725)
        ('2:05', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
