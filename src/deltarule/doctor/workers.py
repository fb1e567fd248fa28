"""Processes that examine configurations: a kernel that breaks its GPU context ends only its own."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from deltarule.doctor.examine import Configuration, Verdict, draw, examine
from deltarule.kernels.triton.verdicts import configuration_name


class Worker:
    """A process that answers one line of JSON with another."""

    def __init__(self) -> None:
        """Start it; importing and the first context take some seconds."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deltarule.doctor.workers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, configuration: Configuration) -> Verdict | None:
        """The verdict, or None if the process has died of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(configuration) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._process.stdout.readline()
        return Verdict(*json.loads(line)) if line else None

    def stop(self) -> int:
        """End the process and return its code."""
        self._process.communicate()
        return self._process.returncode


def examined_apart(configurations: Sequence[Configuration], processes: int) -> Iterator[Verdict]:
    """Verdicts in the order in which they come, from so many processes."""
    local, workers = threading.local(), list[Worker]()

    def examine_in_worker(configuration: Configuration) -> Verdict:
        if getattr(local, "worker", None) is None:
            local.worker = Worker()
            workers.append(local.worker)
        verdict: Verdict | None = local.worker.ask(configuration)
        if verdict is not None:
            return verdict
        code, local.worker = local.worker.stop(), None
        name = configuration_name(draw(configuration, (), torch.device("cpu"), False))
        return Verdict(name, False, f"its process ended with code {code}", float("inf"), 0.0)

    try:
        with ThreadPoolExecutor(processes) as pool:
            for done in as_completed(pool.submit(examine_in_worker, x) for x in configurations):
                yield done.result()
    finally:
        for worker in workers:
            worker.stop()


def main() -> None:
    """Answer every line with a verdict."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in sys.stdin:
        print(json.dumps(examine(Configuration(*json.loads(line)), device)), flush=True)


if __name__ == "__main__":
    main()
