"""The command line: train, use, compare and reproduce, each a command with flags."""

import atexit
import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import deltarule
from deltarule import errors
from deltarule.nearest import nearest
from deltarule.train.extra import MissingExtraError, require
from deltarule.train.progress import for_screen

# Exit codes as shells and other tools use them; 0 is success.
FAILED, MISUSED = 1, 2


class Command(NamedTuple):
    """A command: the function that does it, imported when it is called, and one line about it."""

    function: str
    """As MODULE:NAME, the module of this package or beside it. It is given its flags, whose
    dataclass its argument is annotated with."""
    about: str
    bare: str | None = None
    """The flag that bare words stand for, beyond those that must be given."""

    @property
    def flags(self) -> type[Any]:
        flags, *_ = typing.get_type_hints(self.run).values()
        return flags

    @property
    def run(self) -> Callable[[Any], object]:
        module, _, name = self.function.partition(":")
        with errors.ended_by_ctrl_c():
            return getattr(importlib.import_module(module, "deltarule"), name)


COMMANDS = {
    "train text": Command(
        ".train.text:train_text", "train a byte-level language model on text", "data"
    ),
    "train mqar": Command(".train.mqar:train_mqar", "train on associative recall, in minutes"),
    "data": Command(
        ".train.token_shards:write_data", "write documents as token shards for training"
    ),
    "generate": Command(".train.sample:generate_text", "write text with a trained model", "prompt"),
    "runs": Command(".train.runs:show_runs", "list and compare runs", "names"),
    "eval": Command(".train.report:evaluate_run", "measure bits per byte by position", "data"),
    "convert": Command(".convert:convert_folder", "write a checkpoint in another family's layout"),
    "plot attention": Command(
        ".train.layer_view:plot_attention", "draw what the layers read and write"
    ),
    "doctor": Command(".doctor.command:diagnose", "check the shipped kernels on this GPU"),
    "warmup": Command(".lookup:warm_up", "compile kernels ahead of the first step"),
    "explain": Command(".lookup:explain_call", "say which implementation would run, and why"),
    "plan": Command(".plan:plan", "estimate training steps on many GPUs"),
    "rules": Command(".lookup:rules", "print the table of rules", "name"),
}

# Seconds for which other processes than the first stay when they fail.
PATIENCE_S = 10.0
# What torchrun may start on several processes.
SPREAD = ("train text",)
# First words of commands that are no commands alone.
GROUPS = ("train", "plot")
# What a checkout has beside the package, and the first words of its commands.
BESIDE = {"bench": "bench", "experiments": "reproduce"}


def beside_the_package() -> dict[str, Command]:
    """The commands of a checkout's `bench` and `experiments`; an installed wheel has neither."""
    root = Path(deltarule.__file__).parents[2]
    if not all((root / name / "commands.py").is_file() for name in BESIDE):
        return {}
    if str(root) not in sys.path:
        sys.path.append(str(root))
    modules = [importlib.import_module(f"{name}.commands") for name in BESIDE]
    return {name: command for module in modules for name, command in module.COMMANDS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return its exit code.

    It is 0, or 1 for what cannot be done, 2 for a command line that makes no sense, 130 after
    Ctrl-C. A run that SIGTERM stops has saved all it did: 0.
    """
    for stream in (sys.stdout, sys.stderr):
        # What a terminal has no letter for is shown all the same.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if rank():
        # torchrun ends all as soon as it sees one gone, and the first has to say why.
        atexit.register(time.sleep, PATIENCE_S)
    words = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        code = run(words)
        leave()
        return code
    except errors.StoppedRunError as error:
        from deltarule.train.run_folder import line_that_resumes

        if traceback:
            raise
        say(f"{error}; continue with:\n  {line_that_resumes(error.folder)}")
        if error.code != FAILED:
            leave()
        return error.code
    except KeyboardInterrupt:
        say("stopped")
        return errors.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more as it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except errors.StalledError as error:
        if error.speaks:
            print(f"deltarule: error: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError, MissingExtraError, errors.DivergedError) as error:
        if traceback:
            raise
        say(f"error: {errors.reason(error)}")
        return FAILED
    except Exception as error:
        if traceback:
            raise
        # Memory that is not there, or a mistake of ours.
        why = f"{type(error).__name__}: {errors.reason(error)}"
        line = f"{why}; --traceback shows where it was raised"
        # Perhaps of this process alone: the others then do not speak of it.
        print(f"deltarule: error: {f'process {rank()}: ' if rank() else ''}{line}", file=sys.stderr)
        return FAILED


def run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(for_screen(overview()))
        return 0 if words else MISUSED
    if words[0] == "--version":
        from importlib.metadata import version

        # What matters in a report of a problem.
        print(f"deltarule {deltarule.__version__}, torch {version('torch')}")
        return 0
    commands = COMMANDS
    if words[0] in BESIDE.values() and not (commands := beside_the_package()):
        say(f"error: {words[0]} needs a checkout: git clone deltarule, then pip install -e .")
        return FAILED
    two = " ".join(words[:2])
    name = two if words[0] in GROUPS or two in commands else words[0]
    if name not in commands:
        return unknown(name, words)
    command = commands[name]
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and name not in SPREAD:
        say(f"error: {name} runs on one process; start it without torchrun")
        return MISUSED
    rest = words[len(name.split()) :]
    command.run(read_flags(name, command, rest))
    return 0


def read_flags(name: str, command: Command, words: list[str]) -> Any:
    """Flags as the command's dataclass; to resume, a run's own configuration is the default."""
    from deltarule.config_file import completed

    words = completed(command.flags, command.bare, words)
    given = parse(name, command, words, default=None)
    if not getattr(given, "resume", False):
        return given
    from deltarule.train.run_folder import check_data, folder_to_resume, stored_configuration

    check_data(getattr(given, "data", None), given.runs, name)
    folder = folder_to_resume(given.runs, given.name, name)
    stored = stored_configuration(folder, command.flags, name)
    # A run that was copied or moved goes on where it is now, not where it was started.
    stored = dataclasses.replace(stored, runs=given.runs)
    return parse(name, command, [*words, "--name", folder.name], default=stored)


def parse(name: str, command: Command, words: list[str], default: Any) -> Any:
    """Let tyro read the words; it prints help and complaints itself and leaves with code 0 or 2."""
    from deltarule.config_file import flat

    tyro, conf = require("tyro"), require("tyro.conf")
    options = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            given = tyro.cli(
                command.flags, args=words, prog=f"deltarule {name}",
                config=(conf.OmitArgPrefixes, conf.PositionalRequiredArgs),
                **options,
            )  # fmt: skip
    except SystemExit as left:
        if not rank():
            # Of the processes that torchrun starts the first speaks.
            print(refusal(left) or plain(told.getvalue()), end="", file=sys.stderr)
        raise
    for flag, value in flat(dataclasses.asdict(given)).items():
        if isinstance(value, int | float) and not abs(value) < 2**63:
            raise ValueError(f"--{flag.replace('_', '-')} must be a number below 2^63, got {value}")
    return given


def plain(told: str) -> str:
    """A complaint of tyro's in its frame, with the names of types as flags have them."""

    def named(found: re.Match[str]) -> str:
        line = found[1].removesuffix("Type") + found[2]
        return f"{line:<{len(found[0]) - 1}}{found[3]}"

    return re.sub(r"<class '(\w+)'>(.*)(.)$", named, told, flags=re.MULTILINE)


def refusal(left: SystemExit) -> str:
    """What a dataclass of flags refuses, which tyro would tell by the name of that class."""
    error = left.__context__
    while error is not None:
        if any(
            frame.f_code.co_name == "__post_init__" for frame, _ in walk_tb(error.__traceback__)
        ):
            return f"deltarule: error: {errors.reason(error)}\n"
        error = error.__context__
    return ""


def overview() -> str:
    commands = COMMANDS | beside_the_package()
    lines = [f"  {name:<17} {command.about}" for name, command in commands.items()]
    return "\n".join(
        [
            "usage: deltarule COMMAND [FLAGS]", "",
            "Delta-rule linear recurrent networks: train, use and compare them.", "",
            *lines, "",
            "deltarule COMMAND --help lists a command's flags;",
            "with --config-file FILE, a TOML file gives them;",
            "with --traceback, an error shows its traceback.",
        ]
    )  # fmt: skip


def unknown(name: str, words: list[str]) -> int:
    if words == ["train"] or (words[0] in GROUPS and words[1:2] in (["-h"], ["--help"])):
        print(overview())
        return 0 if len(words) > 1 else MISUSED
    commands = [*COMMANDS, *BESIDE.values()]
    known = ["train", *commands] if len(name.split()) == 1 else commands
    begun = [command for command in known if command.startswith(f"{name} ")]
    meant = nearest(name, begun or known, otherwise=f"known: {', '.join(begun or known)}")
    say(f"error: there is no command {name!r}; {meant}")
    return MISUSED


def leave() -> None:
    """Wait for torchrun's other processes, then end the group; otherwise one may be aborted."""
    atexit.unregister(time.sleep)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def say(text: str) -> None:
    """Print to standard error, so that it never mixes with what a command writes.

    Of the processes that torchrun starts the first speaks: all have come to the same end.
    """
    if not rank():
        print(f"deltarule: {text}", file=sys.stderr)


def rank() -> int:
    return int(os.environ.get("RANK", 0))
