"""Cells in processes: one that dies loses itself alone, and a stop loses no step.

A process runs cell after cell, as its start costs up to 20 seconds on a machine with GPUs: as long
as a short cell takes.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from deltarule.processes import Worker, each_apart
from deltarule.train.loop import Interrupt, InterruptedRunError
from experiments import records
from experiments.experiment import Cell
from experiments.records import Record

# Seconds between two reports of the processes.
REPORT = 30.0

# Takes a cell and its record, or None in the record's place when it starts.
Tell = Callable[[Cell, Record | None], None]
# Of a cell: its record, or words why there is none; after a stop, neither.
Ending = Record | str | None


class StoppedError(RuntimeError):
    """Ctrl-C or SIGTERM; what was finished is kept, and so is what checkpoints hold."""


class OutOfTimeError(StoppedError):
    """The seconds that were allowed are over."""


class MachineError(ValueError):
    """Cells could not go on for a reason that is not their own, such as a full disk."""


class Job(NamedTuple):
    """What a process is given: a cell, where to compute it, and the folder of the experiment."""

    cell: Cell
    folder: Path
    device: torch.device
    began: float

    def log(self) -> Path:
        own = records.own_folder(self.folder, self.cell)
        own.mkdir(parents=True, exist_ok=True)
        return own / "log.txt"

    def died(self, error: str) -> Ending:
        """A process that died without a word is a cell that failed."""
        path = records.record_path(self.folder, self.cell)
        if path.exists():
            return records.checked(path, self.cell)
        seconds = time.monotonic() - self.began
        record = records.make_record(self.cell, {}, error, seconds, self.device)
        try:
            records.write_json(path, record)
        except OSError as failure:
            return f"{self.cell.name}: {failure}"
        return record


def devices_of(device: torch.device, count: int) -> list[torch.device]:
    """The devices that cells are spread over: all `count` GPUs, unless it is a certain one."""
    if device.type != "cuda" or device.index is not None:
        return [device]
    return [torch.device("cuda", index) for index in range(count)]


def least_loaded(devices: Sequence[torch.device], busy: Sequence[torch.device]) -> torch.device:
    return min(devices, key=busy.count)


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    devices: Sequence[torch.device],
    deadline: float = math.inf,
    *,
    workers: int,
    tell: Tell,
    afresh: bool = False,
) -> None:
    """Run cells side by side in this order, each until its record is written, `workers` at a time.

    Each process sees to one of the devices; `afresh`, it runs one cell alone. `tell` hears of every
    cell that starts or ends. Ctrl-C and SIGTERM are a `StoppedError`, the `deadline`, by
    `time.monotonic`, an `OutOfTimeError`. A `MachineError` says that a cell could not go on, as
    with a full disk; the others that were running are finished.
    """
    trouble: list[str] = []
    running: dict[str, Job] = {}
    reported = time.monotonic()

    def jobs() -> Iterator[Job]:
        for cell in cells:
            if trouble:
                return
            device = least_loaded(devices, [job.device for job in running.values()])
            running[cell.name] = Job(cell, folder, device, time.monotonic())
            tell(cell, None)
            yield running[cell.name]

    def look(at_work: Sequence[Worker]) -> None:
        nonlocal reported
        if interrupt.requested:
            raise StoppedError
        if time.monotonic() > deadline:
            raise OutOfTimeError
        if time.monotonic() - reported >= REPORT:
            reported = time.monotonic()
            for worker in at_work:
                line = worker.last_line() or "starting"
                print(f"  {worker.done.task.cell.name}: {line}", flush=True)

    with Interrupt() as interrupt:
        for done in each_apart(
            run_job, jobs(), processes=workers, afresh=afresh, log_of=Job.log, look=look
        ):
            job = running.pop(done.task.cell.name)
            ending = done.value if done.error is None else job.died(done.error)
            if isinstance(ending, str):
                trouble.append(ending)
            elif ending is not None:
                tell(job.cell, ending)
    if trouble:
        raise MachineError("; ".join(trouble))


def run_job(job: Job) -> Ending:
    """What a process does: it leaves a record, or else says in a few words why there is none."""
    # More threads would only take each other's cores.
    torch.set_num_threads(1)
    device = own_gpu(job.device)
    try:
        return records.run_cell(job.cell, job.folder, device)
    except InterruptedRunError:
        return None
    except (*records.ENVIRONMENT, records.RecordError) as error:
        return f"{job.cell.name}: {error}"
    finally:
        # The memory of this cell is the other processes' until the next one needs it.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def own_gpu(device: torch.device) -> torch.device:
    """The GPU of this process, which its first cell decides: another would hold memory twice."""
    if device.type != "cuda" or device.index is None:
        return device
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    # Kernels are launched, and memory is taken, on the GPU that is the process's current one.
    torch.cuda.set_device(device)
    return device
