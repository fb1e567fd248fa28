"""Work in processes of their own: one that dies, hangs or loses its GPU costs one task alone.

caller                     process
task         ------->      value = work(task)      what it prints goes to the task's log
             <-------      value, stays            it leaves where its GPU is lost
"""

import contextlib
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

Task = TypeVar("Task")
Value = TypeVar("Value")
# Seconds between two looks at the processes; that one may take to start, as imports do; and that
# one that is stopped has to end what it is at, such as a checkpoint.
GLANCE, START, GRACE = 0.5, 300.0, 60.0
# What a process ends with whose GPU no longer answers.
LOST = 3
LONGEST_LINE = 200


class Done(NamedTuple, Generic[Task, Value]):
    """A task, and its value or the reason why there is none."""

    task: Task
    value: Value | None = None
    error: str | None = None
    """Such as "the process ended with code -9: its last line"."""


def each_apart(
    work: Callable[[Task], Value],
    tasks: Iterable[Task],
    *,
    processes: int = 1,
    limit_s: float = math.inf,
    afresh: bool = False,
    environment: Mapping[str, str] | None = None,
    log_of: Callable[[Task], Path] | None = None,
    look: Callable[[Sequence["Worker"]], None] | None = None,
) -> Iterator[Done[Task, Value]]:
    """Do tasks side by side, and give each as soon as it is done.

    `work` is a function of a module; an error that it raises ends its process, as a crash does. A
    task can be pickled, and is asked for when there is a process for it, its own where `afresh`;
    after `limit_s` it is given up. Its process prints to `log_of` it, or nowhere. `look` is called
    twice a second with the processes at work; what it raises ends them all, and so does the caller
    who asks for no further task.
    """
    waiting, busy, idle = iter(tasks), list[Worker](), list[Worker]()
    with tempfile.TemporaryDirectory() as folder:
        logs = (Path(folder, str(number)) for number in count())
        try:
            while True:
                for task in islice(waiting, processes - len(busy)):
                    log = next(logs) if log_of is None else log_of(task)
                    busy.append(idle.pop() if idle else Worker(work, environment or {}))
                    busy[-1].take(task, log, limit_s)
                if not busy:
                    return
                wait([worker.words for worker in busy], GLANCE)
                for worker in [worker for worker in busy if worker.is_done()]:
                    busy.remove(worker)
                    if afresh or worker.leaves:
                        stop([worker])
                    else:
                        idle.append(worker)
                    yield worker.done
                if look is not None:
                    look(busy)
        finally:
            stop([*busy, *idle])


class Worker:
    """A process, and the task that it is at."""

    def __init__(self, work: Callable[[Any], Any], environment: Mapping[str, str]) -> None:
        # A forked process cannot use a GPU that its parent has touched.
        context = multiprocessing.get_context("spawn")
        self.words, its_own = context.Pipe()
        self.process = context.Process(target=serve, args=(work, its_own))
        # It has these variables before it imports anything.
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        its_own.close()
        self.ready, self.leaves = False, False

    def take(self, task: object, log: Path, limit_s: float) -> None:
        """Begin a task; its time counts from when the process has started."""
        self.done, self.log, self.at_work = Done[Any, Any](task), log, True
        self.limit_s, self.since = limit_s, time.monotonic()
        # One that has died is noticed as soon as it is looked at.
        with contextlib.suppress(OSError):
            self.words.send((task, log))

    def is_done(self) -> bool:
        try:
            while self.at_work and self.words.poll():
                if (answer := self.words.recv()) is None:
                    self.ready, self.since = True, time.monotonic()
                else:
                    value, self.leaves = answer
                    self.done, self.at_work = self.done._replace(value=value), False
        except (EOFError, OSError):
            self.process.join()
            line = self.last_line()
            code = f"the process ended with code {self.process.exitcode}"
            self.give_up(f"{code}: {line}" if line else code)
        limit = self.limit_s if self.ready else START
        if self.at_work and time.monotonic() - self.since > limit:
            self.process.kill()
            self.give_up(f"took more than {limit:g} s" + ("" if self.ready else " to start"))
        return not self.at_work

    def give_up(self, reason: str) -> None:
        self.done, self.at_work, self.leaves = self.done._replace(error=reason), False, True

    def last_line(self) -> str:
        """What the process printed last; nothing if it has not printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:LONGEST_LINE]


def stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.words.close()
        if worker.at_work:
            worker.process.terminate()
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()


def serve(work: Callable[[Any], Any], words: "Connection[Any, Any]") -> None:
    """What a process does: answer tasks until nobody asks any more."""
    # A terminal sends Ctrl-C to all of its group: only the parent is to hear it.
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=die_with_parent, daemon=True).start()
    # What it said last must not be lost with it.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    words.send(None)
    while True:
        try:
            task, log = words.recv()
        except (EOFError, OSError):
            return
        # All output of this process goes into a file, that of C code included.
        with log.open("a", encoding="utf-8") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        value, lost = work(task), gpu_is_lost()
        with contextlib.suppress(OSError):
            words.send((value, lost))
        if lost:
            # Destructors would wait for the GPU.
            os._exit(LOST)


def gpu_is_lost() -> bool:
    """Whether an access outside its memory has ended this process's use of the GPU."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def die_with_parent() -> None:
    """Leave when the parent is gone: a killed command must not go on in secret."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
