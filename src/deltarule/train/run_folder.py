"""The folder of a run, `runs/NAME`: chosen, locked, and described in run.json."""

import contextlib
import dataclasses
import json
import platform
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

import deltarule
from deltarule.atomic_file import lock, write_json
from deltarule.config_file import flat
from deltarule.errors import INTERRUPTED, StoppedRunError, reason
from deltarule.json_file import fitted, parse_object, read_text
from deltarule.models.files import naming
from deltarule.parallel import World
from deltarule.train.checkpoint import checkpoint_steps

RUN = "run.json"
# Why a run will not go on; a launcher that starts it again is told at once.
DIVERGED = "diverged.txt"
# What may differ between a run and its continuation: it changes no weight, or a note says so.
FREE = {
    "max_seconds", "save_every", "keep", "resume", "runs", "name", "evaluate_every",
    "replicate", "context", "tensor", "keep_gathered", "timeout_s",
    "data", "device", "steps", "cuda_graphs", "activation_checkpointing", "sample_bytes",
    "sample_prompt", "temperature", "curve_bytes", "long_length", "validation_bytes",
    "patience", "log",
}  # fmt: skip
R = TypeVar("R")


@dataclass(frozen=True)
class DataFacts:
    """Which data a run is on."""

    source: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Resumed:
    """A start after the first: from which step, and what had changed since the one before."""

    step: int
    changed: dict[str, str]


@dataclass(frozen=True)
class RunRecord:
    """What run.json says: the command, the options and the machine of its last start."""

    command: str
    configuration: dict[str, Any]
    machine: dict[str, str] = dataclasses.field(default_factory=dict)
    data: DataFacts | None = None
    resumed: tuple[Resumed, ...] = ()
    done: int | None = None
    """After which step model.safetensors was written."""


class RunFolderError(ValueError):
    """The folder of a run is missing, taken, in use, or belongs to another configuration."""


def new_folder(runs: Path, name: str | None, default: str) -> Path:
    """Where a new run goes: `name`, or the first free one of `default`, `default`-2 and so on."""
    if name is None:
        names = (default if n == 1 else f"{default}-{n}" for n in range(1, 1_000_000))
        return next(runs / name for name in names if not (runs / name).exists())
    check_name(name)
    folder = runs / name
    if (folder / RUN).exists():
        raise RunFolderError(
            f"{folder} holds a run already: continue it with: {line_that_resumes(folder)}; "
            "or choose another --name"
        )
    if steps := checkpoint_steps(folder / "checkpoints"):
        raise RunFolderError(
            f"{folder} holds checkpoints, the newest of step {steps[-1]:,}, and no {RUN}: "
            "put that file back to continue them, or choose another --name"
        )
    return folder


def folder_to_resume(runs: Path, name: str | None, command: str) -> Path:
    """The folder of the run of that name, or of the newest run of this command."""
    if name is not None:
        check_name(name)
        if not (runs / name / RUN).exists():
            raise RunFolderError(
                f"--resume: there is no run in {runs / name}; start it with: "
                f"deltarule {command} --name {name}"
            )
        return runs / name
    found = [path for path in runs.glob(f"*/{RUN}") if read_run(path.parent).command == command]
    if not found:
        raise RunFolderError(
            f"--resume: there is no run of '{command}' in {runs}; start one with: "
            f"deltarule {command}"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def check_data(data: str | None, runs: Path, command: str) -> None:
    """Refuse a run given as data, as in `--resume RUN`: the name of a run has a flag of its own."""
    if data is None:
        return
    # Data may have the name of a run.
    folder = Path(data) if Path(data).exists() else runs / data
    if (folder / RUN).is_file():
        raise RunFolderError(
            f"--resume {data}: a run is not data; continue it with: deltarule {command} "
            f"--resume --name {folder.name}"
        )


def check_name(name: str) -> None:
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable():
        raise RunFolderError(f"--name {name!r}: give a plain name; --runs sets the folder above it")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, or refuse it: two processes that write one run would spoil it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        # Where there are no locks, two runs in one folder are not noticed.
        if lock(file) is False:
            raise RunFolderError(
                f"{folder} is in use by another process: let it end, or choose another --name"
            )
        yield


@contextlib.contextmanager
def open_run(
    run: Any, command: str, default: str, world: World, data: DataFacts | None = None
) -> Iterator[Path]:
    """Choose, lock and describe the folder of a run; with `resume`, check that it is the same run.

    The run is a dataclass with `runs`, `name`, `resume` and `loop`, of a command such as "train
    text"; `default` names runs of this kind. It continues only on the same data. Of several
    processes the first holds the folder. A full disk, short memory or Ctrl-C within end it with a
    `StoppedRunError`.
    """
    # A dataclass as JSON keeps it; paths are whole, so that they mean the same elsewhere.
    options = dataclasses.asdict(run) | {"resume": False}
    if options.get("data") is not None:
        options["data"] = str(Path(options["data"]).expanduser().absolute())
    options["runs"] = options["runs"].absolute()
    options = json.loads(json.dumps(options, default=str))
    record = RunRecord(command, options, machine(world), data)
    others: set[Path] = set()
    before: list[tuple[RunRecord, object]] = []
    with contextlib.ExitStack() as held:

        def begin() -> str:
            resume = run.resume or (world.attempt > 0 and was_begun(run, command))
            choose = folder_to_resume if resume else new_folder
            folder = choose(run.runs, run.name, command if resume else default)
            others.update(folder.glob("*"))
            held.enter_context(locked(folder))
            before.extend([(read_run(folder), metrics_of(folder))] if resume else ())
            write_run(folder, continued(folder, run, record) if resume else record)
            return str(folder)

        folder = Path(world.from_first(begin))
        try:
            yield folder
        except (OSError, SafetensorError, torch.OutOfMemoryError) as error:
            said = f"error: {folder} has stopped: {reason(error)}"
            raise StoppedRunError(said, folder) from error
        except KeyboardInterrupt as error:
            raise StoppedRunError(f"stopped {folder}", folder, INTERRUPTED) from error
        except Exception:
            if world.first:
                withdraw(folder, others, before)
            raise


def metrics_of(folder: Path) -> tuple[int, int] | None:
    """Which file it is, and its bytes: whoever begins to train writes it anew."""
    path = folder / "metrics.jsonl"
    return (path.stat().st_ino, path.stat().st_size) if path.exists() else None


def withdraw(folder: Path, others: set[Path], before: list[tuple[RunRecord, object]]) -> None:
    """Undo a start that failed before any training: put the record back, if there was one.

    Of a new run that failed before its first step all but others' files go: none resumes it.
    """
    if before:
        ((record, metrics),) = before
        if metrics_of(folder) == metrics:
            write_run(folder, record)
        return
    _, size = metrics_of(folder) or (0, 0)
    if (folder / DIVERGED).exists() or size:
        return
    for path in set(folder.iterdir()) - others:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def continued(folder: Path, run: Any, record: RunRecord) -> RunRecord:
    """The record of a run that goes on; a note says what has changed since its last start."""
    before = read_run(folder)
    stored = stored_configuration(folder, type(run), record.command)
    ours, theirs = flat(dataclasses.asdict(run)), flat(dataclasses.asdict(stored))
    for name, value in ours.items():
        # Under another configuration it would be neither of the two runs.
        if name not in FREE and value != theirs[name]:
            raise RunFolderError(
                f"--{name.replace('_', '-')} is {value!r}, but {folder} was started with "
                f"{theirs[name]!r}: leave it out to continue that run, or start another with --name"
            )
    old, new = before.data, record.data
    if new is not None and (old is None or old.sha256 != new.sha256):
        then = "unknown" if old is None else f"{old.source}, {old.bytes:,} bytes"
        raise RunFolderError(
            f"{folder} was started on other data: then {then}; now {new.source}, "
            f"{new.bytes:,} bytes: give those data, or another --name"
        )
    step = max(checkpoint_steps(folder / "checkpoints"), default=0)
    steps = run.loop.steps
    if steps < step:
        raise RunFolderError(f"--steps {steps:,}: {folder} has taken {step:,} steps already")
    if steps == step:
        print(f"note: {folder} has taken all of its {steps:,} steps; a larger --steps continues it")
    changed = {
        name: f"{before.machine.get(name)} -> {value}"
        for name, value in record.machine.items() if value != before.machine.get(name)
    }  # fmt: skip
    if changed:
        print(
            f"note: {', '.join(f'{name} {how}' for name, how in changed.items())} since {folder} "
            "was last started: its bits will differ from those of a run that was never stopped"
        )
    if steps != stored.loop.steps:
        changed["steps"] = f"{stored.loop.steps} -> {steps}"
        print(f"note: steps {changed['steps']}: from now on the learning rate follows it")
    resumed = (*before.resumed, Resumed(step, changed))
    return dataclasses.replace(record, resumed=resumed, done=before.done)


def line_that_resumes(folder: Path) -> str:
    record = read_run(folder)
    words = ["deltarule", *record.command.split(), "--resume", "--name", folder.name]
    if (processes := record.machine.get("processes", "1")) != "1":
        words = ["torchrun", "--nproc-per-node", processes, "-m", *words]
    if folder.parent != Path("runs"):
        words += ["--runs", str(folder.parent)]
    return shlex.join(words)


def machine(world: World) -> dict[str, str]:
    """What the bits of a run depend on beside its options and data."""
    device = str(world.device)
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else device
    return {
        "deltarule": deltarule.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "device": gpu,
        "cpu": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads()),
        "processes": str(world.size),
    }  # fmt: skip


def was_begun(run: Any, command: str) -> bool:
    """Whether a run that torchrun starts again had its folder already, and has not diverged."""
    try:
        folder = folder_to_resume(run.runs, run.name, command)
    except RunFolderError:
        return False
    if (folder / DIVERGED).exists():
        raise RunFolderError(f"{folder}: {(folder / DIVERGED).read_text()}")
    return True


def write_run(folder: Path, record: RunRecord) -> None:
    write_json(folder / RUN, dataclasses.asdict(record))


def read_run(folder: Path) -> RunRecord:
    path = folder / RUN
    if not path.is_file():
        inner = ", ".join(sorted(run.parent.name for run in folder.glob(f"*/{RUN}"))[:3])
        hint = f"; there are runs in it, such as {inner}" if inner else ""
        raise RunFolderError(f"{folder}: not the folder of a run, it holds no {RUN}{hint}")
    with naming(path, RunFolderError):
        record: RunRecord = fitted(RunRecord, parse_object(read_text(path)))
    return record


def stored_configuration(folder: Path, kind: type[R], command: str) -> R:
    record = read_run(folder)
    if record.command != command:
        raise RunFolderError(f"{folder} is a run of '{record.command}', not of '{command}'")
    with naming(folder / RUN, RunFolderError):
        configuration: R = fitted(kind, record.configuration, "configuration")
    return configuration
