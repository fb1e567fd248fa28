"""Which implementation a call takes, how plain it is, and what is kept for calls like it."""

import warnings
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import NoneType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

Impl = Literal["auto", "reference", "torch", "triton", "gluon"]

Arguments = TypeVar("Arguments")
Result = TypeVar("Result")


def always(_: object) -> str | None:
    """Never a reason against: for implementations that run every checked call."""
    return None


class Implementation(NamedTuple, Generic[Arguments, Result]):
    """A way to run a call: `why_not` gives the reason it cannot, or None; `run` does it."""

    why_not: Callable[[Arguments], str | None]
    run: Callable[[Arguments], Result]


Table = dict[str, Implementation[Arguments, Result]]


@cache
def triton_missing(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'deltarule[gpu]'"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the Triton kernels need compute capability 8.0, this device has {major}.{minor}"
    return None


def why_no_triton(name: str, x: Tensor) -> str | None:
    """Why no Triton kernel takes what lies where x does; `name` is what a caller calls it."""
    if x.device.type != "cuda":
        return f"Triton needs CUDA tensors, and {name} is on {x.device}"
    # torch.compile cannot trace find_spec; compiled GPU code always has Triton.
    return None if torch.compiler.is_compiling() else triton_missing(x.device)


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
    if not isinstance(impl, str) or impl not in table:
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
        warnings.warn(f"deltarule runs impl={name!r} on a CUDA device: {reason}", stacklevel=5)


Function = TypeVar("Function", bound=Callable[..., object])
# Types with which a call may skip its registered operator, which only costs the host time.
PLAIN = {Tensor, Parameter, NoneType}
# What a call may be given besides tensors.
NUMBERS = {NoneType, bool, int, float, str, torch.dtype}


def are_plain_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no compiler, transform, mode or kind of tensor needs the operator."""
    return is_plain_eager() and PLAIN.issuperset(map(type, tensors))


def is_plain_eager() -> bool:
    """Whether no compiler, transform or mode needs operators."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def constant_when_compiled(function: Function) -> Function:
    """Let the compiler call it once instead of following it to a file.

    What torch.compiler.assume_constant_result does, without loading the compiler with the package.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Leave dtypes alone within; meta tensors, which carry no numbers, have no autocast at all."""
    kind = device.type
    # Autocast is mostly off already, and turning it off takes longer than a launch.
    if kind == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


# Entries of one cache: a layer adds some twenty for every new length of its sequences.
MOST = 1024
# The plans of calls, by what their sizes depend on.
plans: dict[Hashable, Any] = {}
# What is known of the launches of a forward: that it ran ONCE, a `Recording`, or None where they
# cannot be repeated.
recordings: dict[Hashable, Any] = {}
ONCE = "once"
# What kernels were compiled for, side by side, in this process.
compiled: set[Hashable] = set()


class CallKey(NamedTuple):
    """Shapes, strides and types of a call's tensors and its numbers; and the tensors themselves."""

    key: tuple[Any, ...]
    given: list[Tensor]
    addresses: list[int]


def call_key(arguments: Iterable[Any], *others: Hashable) -> CallKey | None:
    """The key of a call with these tensors and numbers; None if one is more than a tensor."""
    # list[Tensor]() would make the type in every call, which takes as long as a tensor's key.
    given, key = [], [*others]
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            given.append(x)
            key += x.dtype, x.shape, x.stride(), x.get_device()
        elif kind in NUMBERS:
            key.append(x)
        else:
            return None
    return CallKey(tuple(key), given, [x.data_ptr() for x in given])


def remember(cache: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """Keep an entry; a full cache starts anew."""
    if len(cache) >= MOST:
        cache.clear()
    cache[key] = found


def forget_calls() -> None:
    plans.clear()
    recordings.clear()
