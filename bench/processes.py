"""Each peer in processes of its own: one that crashes or hangs loses a case, not the others."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.worker import Setting

Row = dict[str, Any]

# How often a worker's progress is looked at, in seconds.
GLANCE = 0.1
LOG_LINE = 200


class Progress(NamedTuple):
    """What a worker's output says: rows by case, and the case that was begun last."""

    rows: dict[int, Row]
    begun: int | None


def run_cases(
    setting: Setting,
    cases: Sequence[Row],
    *,
    limit_s: float,
    environment: Mapping[str, str],
    command: Sequence[str] = (sys.executable, "-m", "bench.worker"),
) -> Iterator[tuple[Row, Row]]:
    """Every case with its figures, or with the reason why it has none.

    Args:
        setting: The peer and what holds for all cases.
        cases: What to do; see `worker.KINDS`.
        limit_s: Seconds after which a case is given up and its process killed.
        environment: Variables beside those of this process.
        command: What is started, with a plan and an output file behind it.
    """
    remaining = list(cases)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            worker = Worker(Path(folder), setting, remaining, environment, command)
            done = 0
            for row in worker.follow(limit_s):
                yield remaining[done], row
                done += 1
        if not done:
            raise RuntimeError("a worker ended and its first case has neither figures nor a reason")
        remaining = remaining[done:]


def importable() -> dict[str, str]:
    """The variable under which a new process finds this checkout's `bench`."""
    root = str(Path(__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


class Worker:
    """A process that does cases, and the files through which it reports."""

    def __init__(
        self,
        folder: Path,
        setting: Setting,
        cases: Sequence[Row],
        environment: Mapping[str, str],
        command: Sequence[str],
    ) -> None:
        """Start it."""
        self.count = len(cases)
        self.output, self.log = folder / "output", folder / "log"
        plan = folder / "plan"
        plan.write_text(json.dumps({"setting": setting._asdict(), "cases": cases}))
        self.output.touch()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(plan), str(self.output)],
                stdout=log, stderr=log, env={**os.environ, **importable(), **environment},
            )  # fmt: skip

    def follow(self, limit_s: float) -> Iterator[Row]:
        """Rows of the cases in order, until all are done or the process is gone.

        The case in which it died gets the reason, and so do all if it never began one.
        """
        given = 0
        try:
            for progress in self.glances(limit_s):
                while given in progress.rows:
                    yield progress.rows[given]
                    given += 1
        finally:
            self.process.kill()
            code = self.process.wait()
        if given == self.count:
            return
        if (begun := self.progress().begun) is None:
            yield from [{"error": self.last_words(code)}] * self.count
        elif given == begun:
            too_long = f"took more than {limit_s:g} s"
            yield {"error": too_long if self.killed else self.last_words(code)}

    def glances(self, limit_s: float) -> Iterator[Progress]:
        """The progress from time to time, and once more when the process has ended."""
        self.killed = False
        seen, since = 0, time.monotonic()
        while (code := self.process.poll()) is None:
            size = self.output.stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()
                yield self.progress()
            if time.monotonic() - since > limit_s:
                self.killed = True
                return
            time.sleep(GLANCE)
        del code
        yield self.progress()

    def progress(self) -> Progress:
        """What the whole lines of the output say so far."""
        rows, begun = {}, None
        for line in self.output.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            entry = json.loads(line)
            if "start" in entry:
                begun = entry["start"]
            else:
                rows[entry["done"]] = entry["row"]
        return Progress(rows, begun)

    def last_words(self, code: int) -> str:
        """How a process ended, with the last line that it printed."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        words = f": {lines[-1].strip()[:LOG_LINE]}" if lines else ""
        return f"the process ended with code {code}{words}"


def empty_caches(folder: Path) -> dict[str, str]:
    """Variables under which nothing compiled earlier is found."""
    return {"TRITON_CACHE_DIR": str(folder / "triton"), "TILELANG_CACHE_DIR": str(folder / "tl")}
