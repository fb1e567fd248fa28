"""`deltarule doctor`: examine configurations, show progress, keep what was found."""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deltarule.atomic_file import write_json
from deltarule.doctor.examine import (
    Configuration,
    Verdict,
    commonest,
    draw,
    every,
    examine,
    examined,
    known_bad,
)
from deltarule.ops.delta_rule.implementations import configuration_name
from deltarule.ops.runtime.machine import failures, findings_file, identity, load_findings
from deltarule.processes import each_apart
from deltarule.train.extra import require
from deltarule.train.progress import make_progress

NO_GPU = (
    "doctor compares the GPU kernels with their definition, but PyTorch sees no CUDA device here"
)
NO_MEMORY = (
    "the GPU has too little free memory for so many processes: end other programs on it, or give "
    "a smaller number as --processes"
)
# A kernel that never ends is wrong, too. The slowest to compile take a minute.
LIMIT_SECONDS = 600.0
# So many processes compile at a time, and so much of the GPU's memory is left to each.
MOST_PROCESSES = 16
PROCESS_BYTES = 3 * 2**30


@dataclass(frozen=True)
class DoctorRun:
    """Compare this GPU's kernels with the float64 definition, and refuse those that fail."""

    all: bool = False
    """Every configuration, not only the 24 most common ones."""
    show: bool = False
    """Print earlier verdicts, and examine nothing."""
    processes: int | None = None
    """Processes at a time; 0 uses this one, None as many as the machine can hold."""


def diagnose(run: DoctorRun) -> None:
    """Examine, print, keep; refuse to without a GPU or Triton, and name what failed."""
    if run.show:
        known = load_findings()
        print(f"{findings_file()}:" if known else "no verdicts yet; deltarule doctor makes them")
        for name, verdict in known.items():
            state = "passed" if verdict["passed"] else "FAILED"
            print(f"  {state}  {name}  {verdict['error'] or ''}")
        return
    if not torch.cuda.is_available():
        raise ValueError(NO_GPU)
    require("triton", "gpu")
    print(", ".join(f"{name} {value}" for name, value in identity().items()))
    if (warning := known_bad(torch.cuda.get_device_capability())) is not None:
        print(warning)
    start, configurations = time.perf_counter(), every() if run.all else commonest()
    found, path = [], findings_file()
    if run.processes == 0:
        verdicts = examined(configurations, torch.device("cuda"))
    else:
        wanted = fitting_processes() if run.processes is None else run.processes
        verdicts = examined_apart(configurations, min(wanted, len(configurations)))
    for verdict in shown(verdicts, len(configurations)):
        # At once: the whole grid takes long, and may be stopped.
        path = keep_verdicts([verdict])
        found.append(verdict)
    failed = [verdict for verdict in found if not verdict.passed]
    seconds = time.perf_counter() - start
    print(f"{len(found) - len(failed)} of {len(found)} passed in {seconds:.0f} s; kept in {path}")
    if failed:
        raise ValueError(f"{len(failed)} configurations failed and are refused from now on")


def examined_apart(configurations: Sequence[Configuration], processes: int) -> Iterator[Verdict]:
    """Verdicts in the order in which they come: a kernel that breaks its GPU context ends only its
    own process.
    """
    for done in each_apart(
        examine_alone, configurations, processes=processes, limit_s=LIMIT_SECONDS
    ):
        if done.error is not None:
            name = configuration_name(draw(done.task, (), torch.device("cpu"), False))
            yield Verdict(name, False, done.error, math.inf, 0.0)
        elif done.value is None:
            raise ValueError(NO_MEMORY)
        else:
            yield done.value


def examine_alone(configuration: Configuration) -> Verdict | None:
    """What a process of its own finds; None: there was no memory to find it."""
    torch.set_num_threads(1)
    try:
        return examine(configuration, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except torch.OutOfMemoryError:
        return None


def fitting_processes() -> int:
    """One process for each processor, as far as the GPU's memory has room for them."""
    available = getattr(os, "sched_getaffinity", None)
    processors = (os.cpu_count() or 1) if available is None else len(available(0))
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(processors, MOST_PROCESSES, free // PROCESS_BYTES))


def keep_verdicts(found: Iterable[Verdict]) -> Path:
    """Add to what is kept of this machine; a new verdict replaces an old one."""
    verdicts = load_findings() | {
        verdict.name: {name: getattr(verdict, name) for name in ("passed", "error", "times_bar")}
        for verdict in found
    }
    path = findings_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"machine": identity(), "doctor": verdicts}, indent=1)
    failures.cache_clear()
    return path


def shown(verdicts: Iterator[Verdict], total: int) -> Iterator[Verdict]:
    """Pass verdicts on, each told on a line; a terminal has a bar for those that passed."""
    live = sys.stdout.isatty()
    with make_progress(total, what="examined") as bar:
        for count, verdict in enumerate(verdicts, 1):
            state = "passed" if verdict.passed else "FAILED"
            if not (live and verdict.passed):
                bar.note(
                    f"{state}  {verdict.name}  {verdict.times_bar:.2f} of the bar  "
                    f"{verdict.seconds:.1f} s  {verdict.error or ''}"
                )
            bar.update(count, {})
            yield verdict
