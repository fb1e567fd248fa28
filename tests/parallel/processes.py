"""Processes that wait for work: started once for all tests of a session, on gloo.

Every process runs the same function of a file in this folder with the same arguments (JSON), as
under torchrun, and answers with what it returns (JSON) or with its traceback.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 300


class Processes:
    """So many processes of one group, in the order of their ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: list[subprocess.Popen[str]] = []

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
            # Nobody has asked yet, or they were ended for a failure.
            self.folder = tempfile.TemporaryDirectory()
            self.running = [self._start(rank) for rank in range(self.size)]
        line = json.dumps([function, arguments]) + "\n"
        for process in self.running:
            process.stdin.write(line)
            process.stdin.flush()
        with ThreadPoolExecutor(self.size) as pool:
            answers = [pool.submit(answer_of, process) for process in self.running]
            late = wait(answers, TIMEOUT_S, FIRST_EXCEPTION).not_done
            # Where one has failed, the others may wait for it in vain.
            if wait(late, 5).not_done:
                self.close()
        if failed := [str(error) for answer in answers if (error := answer.exception())]:
            raise AssertionError("\n".join(failed))
        return [answer.result() for answer in answers]

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        if self.running:
            self.folder.cleanup()
        self.running = []


def answer_of(process: subprocess.Popen[str]) -> Any:
    """What a process has computed; its error is raised here."""
    line = process.stdout.readline()
    kind, value = json.loads(line) if line else ("error", "no answer from some")
    if kind == "error":
        raise AssertionError(value)
    return value


def serve() -> None:
    """Answer lines of standard input until it ends."""
    import torch
    import torch.distributed as dist

    sys.path += map(str, Path(__file__).parents[1:3])
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
