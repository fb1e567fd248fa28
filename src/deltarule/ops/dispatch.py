"""Tables of implementations, and the choice among them."""

import warnings
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

from deltarule.kernels.inputs import Inputs
from deltarule.ops.registered import recurrence
from deltarule.reference import recurrent
from deltarule.shapes import RecurrentOutput

Impl = Literal["auto", "reference", "torch", "triton"]


Call = TypeVar("Call")
Result = TypeVar("Result")


class Implementation(NamedTuple, Generic[Call, Result]):
    """A way to run a call: `why_not` gives the reason it cannot, or None; `run` does it."""

    why_not: Callable[[Call], str | None]
    run: Callable[[Call], Result]


Table = dict[str, Implementation[Call, Result]]


def run_torch(inputs: Inputs) -> RecurrentOutput:
    """Chunks in PyTorch, with a backward of its own: any device."""
    return recurrence(inputs, "torch")


def run_reference(inputs: Inputs) -> RecurrentOutput:
    """The definition, one token at a time, differentiable to any order."""
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
IMPLEMENTATIONS: Table[Inputs, RecurrentOutput] = {
    "torch": Implementation(why_not=always, run=run_torch),
    "reference": Implementation(why_not=always, run=run_reference),
}


def first_that_runs(table: Table[Call, Result], call: Call) -> str:
    """What impl="auto" chooses."""
    return next(name for name, i in table.items() if i.why_not(call) is None)


def choose(
    table: Table[Call, Result], call: Call, impl: str, device: torch.device
) -> Implementation[Call, Result]:
    """The implementation asked for, or for "auto" the first that can run.

    Called by a function that the user called through one other function: the place of a warning.
    """
    if impl == "auto":
        name = first_that_runs(table, call)
        if device.type == "cuda" and name != "triton":
            warn_slow(name, table["triton"].why_not(call) if "triton" in table else NO_KERNEL)
        return table[name]
    if impl not in table:
        names = ", ".join(repr(name) for name in ("auto", *table))
        raise ValueError(f"impl must be one of {names}, got {impl!r}")
    if (reason := table[impl].why_not(call)) is not None:
        raise ValueError(f"impl={impl!r} cannot run this: {reason}")
    return table[impl]


def dispatch(inputs: Inputs, impl: str) -> RecurrentOutput:
    """Run the chosen implementation of `delta_rule` or `dplr`."""
    return choose(IMPLEMENTATIONS, inputs, impl, inputs.q.device).run(inputs)


NO_KERNEL = "this version has a GPU kernel for recurrent_step only"
_warned: set[str | None] = set()


def warn_slow(name: str, reason: str | None) -> None:
    """Say once for each reason that a GPU runs a path without GPU kernels."""
    if reason not in _warned and not torch.compiler.is_compiling():
        _warned.add(reason)
        warnings.warn(
            f"deltarule runs impl={name!r} on a CUDA device: {reason}",
            stacklevel=5,
        )
