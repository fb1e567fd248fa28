"""Processes that wait for work: started once for all tests of a session, on gloo.

Every process runs the same function of a file in this folder with the same arguments (JSON), as
under torchrun, and answers with what it returns (JSON) or with its traceback.
"""

import contextlib
import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

TIMEOUT_S = 300


class Processes:
    """So many processes of one group, in the order of their ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: list[subprocess.Popen[str]] = []
        self._open()

    def _open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.running = [self._start(rank) for rank in range(self.size)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank),
            "GROUP_FILE": str(Path(self.folder.name) / "group"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __call__(self, function: str, **arguments: Any) -> list[Any]:
        """What "file.function" returns on each process; an error on any is raised here."""
        if not self.running:
            # They were ended for a failure before.
            self._open()
        line = json.dumps([function, arguments]) + "\n"
        for process in self.running:
            process.stdin.write(line)
            process.stdin.flush()
        answers = self._answers()
        if failed := [text for kind, text in answers if kind == "error"]:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _answers(self) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        until = time.monotonic() + TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.running):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.size:
                ready = selector.select(max(0.0, until - time.monotonic()))
                # Where one has failed, the others may wait for it in vain.
                late = not ready or any(kind == "error" for kind, _ in answers.values())
                for key, _ in ready:
                    line = self.running[key.data].stdout.readline()
                    answers[key.data] = tuple(json.loads(line)) if line else ("error", "it ended")
                    selector.unregister(key.fileobj)
                if not ready and late:
                    self.close()
                    raise AssertionError(f"no answer from some of {self.size}: {answers}")
                if any(kind == "error" for kind, _ in answers.values()):
                    until = min(until, time.monotonic() + 5)
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self.running = []
        self.folder.cleanup()


def serve() -> None:
    """Answer lines of standard input until it ends."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["GROUP_FILE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            file, function = name.split(".")
            torch.manual_seed(0)
            answer = "ok", getattr(importlib.import_module(file), function)(**arguments)
        except Exception:
            answer = "error", f"rank {rank}: {traceback.format_exc()}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve()
