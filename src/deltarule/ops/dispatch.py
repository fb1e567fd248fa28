"""Tables of implementations, and the choice among them."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.triton.verdicts import refusal
from deltarule.ops.registered import recurrence
from deltarule.reference import recurrent
from deltarule.shapes import RecurrentOutput

Impl = Literal["auto", "reference", "torch", "triton"]


Arguments = TypeVar("Arguments")
Result = TypeVar("Result")


class Implementation(NamedTuple, Generic[Arguments, Result]):
    """A way to run a call: `why_not` gives the reason it cannot, or None; `run` does it."""

    why_not: Callable[[Arguments], str | None]
    run: Callable[[Arguments], Result]


Table = dict[str, Implementation[Arguments, Result]]

MAX_KEY_CHANNELS, MAX_VALUE_CHANNELS = 256, 512


class Call(NamedTuple):
    """A call of `delta_rule` or `dplr`, and whether its backward finds the chunks' states saved."""

    inputs: Inputs
    save_states: bool = True


def why_not_triton(call: Call) -> str | None:
    """What the Triton kernels over chunks cannot do."""
    q, v = call.inputs.q, call.inputs.v
    if q.device.type != "cuda":
        return f"Triton needs CUDA tensors, and q is on {q.device}"
    # Code compiled for a GPU has Triton, and the compiler cannot follow a look for it.
    if not torch.compiler.is_compiling() and (reason := triton_missing(q.device)):
        return reason
    if q.dtype == torch.float64:
        return "the Triton kernels compute in float32, and q is float64"
    if q.shape[3] > MAX_KEY_CHANNELS or v.shape[3] > MAX_VALUE_CHANNELS:
        return (
            f"the Triton kernels take K up to {MAX_KEY_CHANNELS} and V up to "
            f"{MAX_VALUE_CHANNELS}, got K = {q.shape[3]} and V = {v.shape[3]}"
        )
    return refusal(call.inputs)


@cache
def triton_missing(device: torch.device) -> str | None:
    """Why no Triton kernel runs on this device at all."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install deltarule[gpu]"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the Triton kernels need compute capability 8.0, this device has {major}.{minor}"
    return None


def run_triton(call: Call) -> RecurrentOutput:
    """Chunks in Triton, with a backward of its own."""
    return recurrence(call.inputs, "triton" if call.inputs.q.numel() else "torch", call.save_states)


def run_torch(call: Call) -> RecurrentOutput:
    """Chunks in PyTorch, with a backward of its own: any device."""
    return recurrence(call.inputs, "torch", call.save_states)


def run_reference(call: Call) -> RecurrentOutput:
    """The definition, one token at a time, differentiable to any order."""
    inputs = call.inputs
    with torch.autocast(inputs.q.device.type, enabled=False):
        return _reference(inputs)


def _reference(inputs: Inputs) -> RecurrentOutput:
    q, k, v, beta, a, b, log_decay, initial_state, cu_seqlens, *_ = inputs
    if a is not None and b is not None:
        return recurrent.dplr(
            q, k, v, a=a, b=b, log_decay=log_decay, scale=inputs.scale,
            initial_state=initial_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    return recurrent.delta_rule(
        q, k, v, beta=beta, log_decay=log_decay, n_steps=inputs.n_steps, scale=inputs.scale,
        normalize_qk=inputs.normalize_qk, initial_state=initial_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def always(_: object) -> str | None:
    """For an implementation that runs whatever passed the checks."""
    return None


# In the order in which impl="auto" prefers them.
IMPLEMENTATIONS: Table[Call, RecurrentOutput] = {
    "triton": Implementation(why_not=why_not_triton, run=run_triton),
    "torch": Implementation(why_not=always, run=run_torch),
    "reference": Implementation(why_not=always, run=run_reference),
}


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


def dispatch(inputs: Inputs, impl: str, save_states: bool) -> RecurrentOutput:
    """Run the chosen implementation of `delta_rule` or `dplr`."""
    call = Call(inputs, save_states)
    return choose(IMPLEMENTATIONS, call, impl, inputs.q.device).run(call)


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
