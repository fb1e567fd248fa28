"""Tables of implementations, and the choice among them."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

Impl = Literal["auto", "reference", "torch", "triton", "gluon"]


Arguments = TypeVar("Arguments")
Result = TypeVar("Result")


class Implementation(NamedTuple, Generic[Arguments, Result]):
    """A way to run a call: `why_not` gives the reason it cannot, or None; `run` does it."""

    why_not: Callable[[Arguments], str | None]
    run: Callable[[Arguments], Result]


Table = dict[str, Implementation[Arguments, Result]]


@cache
def triton_missing(device: torch.device) -> str | None:
    """Why no Triton kernel runs on this device at all."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install deltarule[gpu]"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the Triton kernels need compute capability 8.0, this device has {major}.{minor}"
    return None


def always(_: object) -> str | None:
    """For an implementation that runs whatever passed the checks."""
    return None


def first_that_runs(table: Table[Arguments, Result], call: Arguments) -> str:
    """What impl="auto" chooses."""
    return next(name for name, i in table.items() if i.why_not(call) is None)


def choose(
    table: Table[Arguments, Result], call: Arguments, impl: str, device: torch.device
) -> Implementation[Arguments, Result]:
    """The implementation asked for, or for "auto" the first that can run.

    Called by a function that the user called through one other function: the place of a warning.
    """
    if impl == "auto":
        name = first_that_runs(table, call)
        if name != "triton" and device.type == "cuda":
            warn_slow(name, table["triton"].why_not(call) if "triton" in table else NO_KERNEL)
        return table[name]
    if impl not in table:
        names = ", ".join(repr(name) for name in ("auto", *table))
        raise ValueError(f"impl must be one of {names}, got {impl!r}")
    if (reason := table[impl].why_not(call)) is not None:
        raise ValueError(f"impl={impl!r} cannot run this: {reason}")
    return table[impl]


NO_KERNEL = "this operator has no GPU kernel yet"
_warned: set[str | None] = set()


def warn_slow(name: str, reason: str | None) -> None:
    """Say once for each reason that a GPU runs a path without GPU kernels."""
    if reason not in _warned and not torch.compiler.is_compiling():
        _warned.add(reason)
        warnings.warn(
            f"deltarule runs impl={name!r} on a CUDA device: {reason}",
            stacklevel=5,
        )
