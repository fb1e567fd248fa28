"""The folder of a run, `runs/NAME`: chosen, locked, and described in run.json."""

import contextlib
import dataclasses
import json
import platform
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

import deltarule
from deltarule.models import CausalLM
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.nn.atomic_file import write_atomically
from deltarule.parallel import World

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no flock; there, two runs in one folder are not noticed.
    fcntl = None  # type: ignore[assignment]

RUN = "run.json"
# Why a run will not go on; a launcher that starts it again is told at once.
DIVERGED = "diverged.txt"
# What may differ between a run and its continuation without changing a single bit of it.
FREE = {
    "max_seconds", "save_every", "keep", "resume", "runs", "name", "evaluate_every",
    "replicate", "context", "tensor", "keep_gathered", "timeout_s",
}  # fmt: skip
R = TypeVar("R")


class RunFolderError(ValueError):
    """The folder of a run is missing, taken, in use, or belongs to another configuration."""


def new_folder(runs: Path, name: str | None, default: str) -> Path:
    """Where a new run goes: `name`, or the first free one of `default`, `default`-2 and so on.

    Raises:
        RunFolderError: The name is no plain name, or it is taken.
    """
    if name is None:
        names = (default if n == 1 else f"{default}-{n}" for n in range(1, 1_000_000))
        return next(runs / name for name in names if not (runs / name).exists())
    check_name(name)
    if (runs / name / RUN).exists():
        raise RunFolderError(
            f"{runs / name} holds a run already: continue it with --resume, "
            "or choose another --name"
        )
    return runs / name


def folder_to_resume(runs: Path, name: str | None, command: str) -> Path:
    """The folder of the run of that name, or of the newest run of this command.

    Raises:
        RunFolderError: There is no such run.
    """
    if name is not None:
        check_name(name)
        if not (runs / name / RUN).exists():
            raise RunFolderError(
                f"--resume: there is no run in {runs / name}; start it without --resume"
            )
        return runs / name
    found = [path for path in runs.glob(f"*/{RUN}") if read_run(path.parent)["command"] == command]
    if not found:
        raise RunFolderError(
            f"--resume: there is no run of '{command}' in {runs}; start one without --resume"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent


def check_name(name: str) -> None:
    """Refuse a name that would leave the folder of all runs.

    Raises:
        RunFolderError: It is no plain name.
    """
    if name in ("", ".", "..") or Path(name).name != name:
        raise RunFolderError(f"--name {name!r}: give a plain name; --runs sets the folder above it")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder: two processes that write one run would spoil it.

    Raises:
        RunFolderError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(f"{folder} is in use by another process") from None
        yield


@contextlib.contextmanager
def open_run(
    run: Any, command: str, default: str, facts: dict[str, Any], world: World | None = None
) -> Iterator[Path]:
    """Choose, lock and describe the folder of a run; with `resume`, check that it is the same run.

    Args:
        run: A dataclass with `runs`, `name` and `resume`.
        command: What the run is of, such as "train text".
        default: The name of runs of this kind.
        facts: What the run is on, such as its data; a run continues only on the same.
        world: The processes of the run, of which the first holds the folder. None: one process.

    Raises:
        RunFolderError: The folder is taken, in use, missing, or another run's.
    """
    with contextlib.ExitStack() as held:

        def begin() -> str:
            resume = run.resume or was_begun(run, command, world)
            if resume:
                folder = folder_to_resume(run.runs, run.name, command)
            else:
                folder = new_folder(run.runs, run.name, default)
            held.enter_context(locked(folder))
            if not resume:
                write_run(folder, command, run, facts)
                return str(folder)
            check_same(run, stored_configuration(folder, type(run), command), folder)
            for name, fact in facts.items():
                if read_run(folder).get(name) != fact:
                    raise RunFolderError(f"{folder} was started on other {name} than is there now")
            return str(folder)

        yield Path(begin() if world is None else world.from_first(begin))


def was_begun(run: Any, command: str, world: World | None) -> bool:
    """Whether torchrun starts a run again that had its folder already.

    Raises:
        RunFolderError: It has diverged, and would again.
    """
    if world is None or world.attempt == 0:
        return False
    try:
        folder = folder_to_resume(run.runs, run.name, command)
    except RunFolderError:
        return False
    if (folder / DIVERGED).exists():
        raise RunFolderError(f"{folder}: {(folder / DIVERGED).read_text()}")
    return True


def write_run(folder: Path, command: str, run: Any, facts: dict[str, Any]) -> None:
    """Write run.json: the command, its whole configuration, and what it was run on."""
    versions = {"deltarule": deltarule.__version__, "torch": torch.__version__}
    versions["python"] = platform.python_version()
    content = {
        "command": command,
        "configuration": json.loads(json.dumps(dataclasses.asdict(run), default=str)),
        **facts,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }
    text = json.dumps(content, indent=2) + "\n"

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    write_atomically(folder / RUN, write)


def read_run(folder: Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        RunFolderError: There is none, or it cannot be read.
    """
    path = folder / RUN
    if not path.is_file():
        raise RunFolderError(f"{folder}: not the folder of a run, it holds no {RUN}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("command"), str):
        raise RunFolderError(f"{path}: it does not describe a run")
    return content


def stored_configuration(folder: Path, kind: type[R], command: str) -> R:
    """The configuration in run.json, as the dataclass it was made from.

    Raises:
        RunFolderError: The run is of another command, or its configuration does not fit.
    """
    content = read_run(folder)
    if content["command"] != command:
        raise RunFolderError(f"{folder} is a run of '{content['command']}', not of '{command}'")
    try:
        configuration: R = from_plain(kind, content["configuration"])
    except (KeyError, TypeError, ValueError) as error:
        path = folder / RUN
        raise RunFolderError(f"{path}: not a configuration of this version: {error}") from error
    return configuration


def check_same(run: Any, stored: Any, folder: Path) -> None:
    """Refuse to continue a run under another configuration: it would be neither of the two.

    Raises:
        RunFolderError: An option differs; the message names it.
    """
    ours, theirs = flat(dataclasses.asdict(run)), flat(dataclasses.asdict(stored))
    for name, value in ours.items():
        if name not in FREE and value != theirs[name]:
            flag = "--" + name.replace("_", "-")
            raise RunFolderError(
                f"{flag} is {value!r}, but {folder} was started with {theirs[name]!r}: "
                "leave it out to continue that run, or start another with --name"
            )


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """Nested options under their last names, which are unique, as on the command line."""
    plain: dict[str, Any] = {}
    for name, value in options.items():
        plain.update(flat(value) if isinstance(value, dict) else {name: value})
    return plain


def from_plain(kind: Any, value: Any) -> Any:
    """Build a (nested) dataclass from what JSON keeps of it.

    Examples:
        >>> from deltarule.train.loop import LoopOptions
        >>> from_plain(LoopOptions, {"steps": 7}).steps
        7
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], v) for name, v in value.items()})  # type: ignore[operator]
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is not None and Path in options:
        return Path(value)
    return tuple(value) if isinstance(value, list) else value


def load_model(folder: Path, device: torch.device) -> CausalLM:
    """The byte-level model of a finished run.

    Raises:
        CheckpointError: The folder holds no model that can be read.
        RunFolderError: There is no run, it is not finished, or its model is not one of bytes.
    """
    if not (folder / "config.json").exists():
        if not folder.is_dir():
            raise RunFolderError(f"{folder}: there is no such run")
        raise RunFolderError(
            f"{folder} holds no finished model: a run writes it at its end; "
            f"let it get there with --name {folder.name} --resume, if need be with --max-seconds 1"
        )
    model = CausalLM.load(folder, device=device)
    if model.config.vocab_size != VOCAB_SIZE:
        raise RunFolderError(
            f"{folder} holds a model of {model.config.vocab_size} tokens, not of bytes: "
            "only runs of 'deltarule train text' read and write text"
        )
    return model.eval()
