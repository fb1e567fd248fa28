"""Cells in processes of their own: one that dies loses itself alone, and a stop loses no step."""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deltarule.train.interrupt import Interrupt
from deltarule.train.loop import InterruptedRunError
from experiments.experiment import Cell
from experiments.records import Record, RecordError, checked, write_json
from experiments.run_cell import ENVIRONMENT, make_record, own_folder, record_path, run_cell

# Seconds between two looks at the processes, and between two reports of them.
GLANCE, REPORT = 0.5, 30.0
# Seconds that a stopped process has to end its step and write its checkpoint.
GRACE = 60.0
# Characters of what a process says in the end; more than a pipe holds would never be sent.
LONGEST = 1000

# Takes a cell and its record, or None in the record's place when it starts.
Tell = Callable[[Cell, Record | None], None]


class StoppedError(RuntimeError):
    """Ctrl-C or SIGTERM; what was finished is kept, and so is what checkpoints hold."""


class MachineError(ValueError):
    """Cells could not go on for a reason that is not their own, such as a full disk."""


class Ending(NamedTuple):
    """Of a process: the record of its cell, or why there is none; after a stop, neither."""

    record: Record | None = None
    trouble: str | None = None


@dataclass
class Worker:
    """A process at work on a cell."""

    cell: Cell
    process: BaseProcess
    words: "Connection[Any, Any]"
    log: Path
    device: torch.device
    began: float = field(default_factory=time.monotonic)

    def last_line(self) -> str:
        """What it printed last."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "starting")

    def result(self, folder: Path) -> Ending:
        """How it ended; a process that died without a word is a cell that failed."""
        self.process.join()
        path = record_path(folder, self.cell)
        if path.exists():
            return Ending(record=checked(path, self.cell))
        with contextlib.suppress(EOFError):
            if self.words.poll():
                return Ending(trouble=self.words.recv())
        code, seconds = self.process.exitcode, time.monotonic() - self.began
        error = f"the process ended with code {code}: {self.last_line()}"
        record = make_record(self.cell, {}, error, seconds, self.device)
        try:
            write_json(path, record)
        except OSError as failure:
            return Ending(trouble=f"{self.cell.name}: {failure}")
        return Ending(record)


def devices_of(device: torch.device, count: int) -> list[torch.device]:
    """The devices that cells are spread over: all GPUs, unless the device is a certain one.

    Args:
        device: As it was asked for.
        count: How many GPUs there are.

    Examples:
        >>> devices_of(torch.device("cuda"), 2)
        [device(type='cuda', index=0), device(type='cuda', index=1)]
        >>> devices_of(torch.device("cuda:1"), 2)
        [device(type='cuda', index=1)]
    """
    if device.type != "cuda" or device.index is not None:
        return [device]
    return [torch.device("cuda", index) for index in range(count)]


def least_loaded(devices: Sequence[torch.device], busy: Sequence[torch.device]) -> torch.device:
    """The device with the fewest processes, the first of several.

    Args:
        devices: To choose from.
        busy: That of each process at work.
    """
    return min(devices, key=busy.count)


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    devices: Sequence[torch.device],
    *,
    workers: int,
    tell: Tell,
) -> None:
    """Run cells side by side, each until its record is written.

    Args:
        cells: What to run, in this order.
        folder: Of the experiment.
        devices: Where to compute; each process sees to one of them.
        workers: Processes at a time on all devices together, 1 or more.
        tell: Hears of every cell that starts or ends.

    Raises:
        StoppedError: Ctrl-C or SIGTERM.
        MachineError: A cell could not go on, for a reason such as a full disk; the others that
            were running are finished.
    """
    waiting, running = list(reversed(cells)), list[Worker]()
    trouble: list[str] = []
    try:
        with Interrupt() as interrupt:
            while running or (waiting and not trouble):
                while waiting and len(running) < workers and not trouble:
                    device = least_loaded(devices, [worker.device for worker in running])
                    running.append(start(waiting.pop(), folder, device))
                    tell(running[-1].cell, None)
                for worker in watch(running, interrupt):
                    running.remove(worker)
                    ending = worker.result(folder)
                    if ending.record is not None:
                        tell(worker.cell, ending.record)
                    trouble += [] if ending.trouble is None else [ending.trouble]
                if interrupt.requested:
                    raise StoppedError
    finally:
        stop(running)
    if trouble:
        raise MachineError("; ".join(trouble))


def watch(running: Sequence[Worker], interrupt: Interrupt) -> list[Worker]:
    """Wait until a process ends or a stop is asked for; report on all from time to time."""
    reported = time.monotonic()
    while not interrupt.requested:
        gone = wait([worker.process.sentinel for worker in running], timeout=GLANCE)
        if gone:
            return [worker for worker in running if worker.process.sentinel in gone]
        if time.monotonic() - reported >= REPORT:
            reported = time.monotonic()
            for worker in running:
                print(f"  {worker.cell.name}: {worker.last_line()}", flush=True)
    return []


def stop(running: Sequence[Worker]) -> None:
    """Ask processes to end, and end those that do not."""
    for worker in running:
        worker.process.terminate()
    deadline = time.monotonic() + GRACE
    for worker in running:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()


def start(cell: Cell, folder: Path, device: torch.device) -> Worker:
    """Start a process for a cell."""
    # A forked process cannot use a GPU that its parent has touched.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    own = own_folder(folder, cell)
    own.mkdir(parents=True, exist_ok=True)
    process = context.Process(
        target=work, args=(cell, folder, device, own / "log.txt", sender), daemon=True
    )
    process.start()
    sender.close()
    return Worker(cell, process, receiver, own / "log.txt", device)


def work(
    cell: Cell, folder: Path, device: torch.device, log: Path, words: "Connection[Any, Any]"
) -> None:
    """What a process does: it leaves a record, or else says in a few words why there is none."""
    # A terminal sends Ctrl-C to all of its group: only the parent is to hear it.
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=die_with_parent, daemon=True).start()
    # More threads would only take each other's cores.
    torch.set_num_threads(1)
    if device.type == "cuda" and device.index is not None:
        # Kernels are launched, and memory is taken, on the GPU that is the process's current one.
        torch.cuda.set_device(device)
    try:
        with log.open("a", encoding="utf-8") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        run_cell(cell, folder, device)
    except InterruptedRunError:
        words.send(None)
    except (*ENVIRONMENT, RecordError) as error:
        words.send(f"{cell.name}: {error}"[:LONGEST])


def die_with_parent() -> None:
    """Leave when the parent is gone: a killed command must not go on in secret."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
