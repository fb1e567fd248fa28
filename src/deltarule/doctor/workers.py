"""Processes that examine configurations: a kernel that breaks its GPU context ends only its own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import torch

from deltarule.doctor.examine import Configuration, Verdict, draw, examine, usable
from deltarule.ops.delta_rule.implementations import configuration_name

PROGRAM = [sys.executable, "-m", "deltarule.doctor.workers"]
# A kernel that never ends is wrong, too. The slowest to compile take a minute.
LIMIT_SECONDS = 600.0
NO_MEMORY = (
    "the GPU has too little free memory to examine kernels in so many processes: end what else "
    "runs on it, or give a smaller number as --processes"
)


class Answer(NamedTuple):
    """A verdict, None if there was no memory to find one; and whether the process can go on."""

    verdict: Verdict | None
    usable: bool


class Worker:
    """A process that answers one line of JSON with another."""

    def __init__(self) -> None:
        """Start it; importing and the first context take some seconds."""
        # Ctrl-C is for this process, which then ends the others: their end is no finding.
        self._process = subprocess.Popen(
            PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, configuration: Configuration) -> Answer | None:
        """The answer, or None if the process has died of it or was too slow."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        clock = threading.Timer(LIMIT_SECONDS, self._process.kill)
        clock.start()
        try:
            self._process.stdin.write(json.dumps(configuration) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            clock.cancel()
        if not line:
            return None
        verdict, going_on = json.loads(line)
        return Answer(None if verdict is None else Verdict(*verdict), going_on)

    def stop(self) -> int:
        """End the process and return its code."""
        self._process.communicate()
        return self._process.returncode

    def kill(self) -> None:
        """End the process in the middle of its work."""
        self._process.kill()


def examined_apart(configurations: Sequence[Configuration], processes: int) -> Iterator[Verdict]:
    """Verdicts in the order in which they come, from so many processes.

    Raises:
        ValueError: The GPU's memory does not hold what so many processes need.
    """
    local, workers = threading.local(), set[Worker]()

    def examine_in_worker(configuration: Configuration) -> Verdict:
        if getattr(local, "worker", None) is None:
            local.worker = Worker()
            workers.add(local.worker)
        worker: Worker = local.worker
        answer = worker.ask(configuration)
        if answer is not None and answer.usable:
            return verdict_of(answer)
        local.worker, code = None, worker.stop()
        workers.discard(worker)
        if answer is not None:
            return verdict_of(answer)
        name = configuration_name(draw(configuration, (), torch.device("cpu"), False))
        return Verdict(name, False, f"its process ended with code {code}", float("inf"), 0.0)

    pool = ThreadPoolExecutor(processes)
    try:
        for done in as_completed([pool.submit(examine_in_worker, x) for x in configurations]):
            yield done.result()
    finally:
        # All are idle at the regular end; after an error or Ctrl-C nobody waits for the rest.
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in list(workers):
            worker.kill()
        pool.shutdown()
        for worker in workers:
            worker.stop()


def verdict_of(answer: Answer) -> Verdict:
    """What was found, if there was memory to find it."""
    if answer.verdict is None:
        raise ValueError(NO_MEMORY)
    return answer.verdict


def main() -> None:
    """Answer every line with a verdict."""
    # What a compiler prints must not come among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in sys.stdin:
        answer = answer_of(Configuration(*json.loads(line)), device)
        print(json.dumps(answer), file=answers, flush=True)
        if not answer.usable:
            return


def answer_of(configuration: Configuration, device: torch.device) -> Answer:
    """One verdict, and whether this process can find another."""
    try:
        verdict = examine(configuration, device)
    except torch.OutOfMemoryError:
        return Answer(None, False)
    return Answer(verdict, verdict.passed or usable(device))


if __name__ == "__main__":
    main()
