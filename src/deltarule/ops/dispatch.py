"""The one table of implementations, and the choice among them."""

import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from deltarule.kernels.inputs import Inputs
from deltarule.ops.registered import recurrence
from deltarule.reference import recurrent
from deltarule.shapes import RecurrentOutput

Impl = Literal["auto", "reference", "torch"]


class Implementation(NamedTuple):
    """A way to run an operator: `why_not` gives the reason it cannot, or None; `run` does it."""

    why_not: Callable[[Inputs], str | None]
    run: Callable[[Inputs], RecurrentOutput]


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


def always(_: Inputs) -> str | None:
    """For an implementation that runs whatever passed the checks."""
    return None


# In the order in which impl="auto" prefers them.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "torch": Implementation(why_not=always, run=run_torch),
    "reference": Implementation(why_not=always, run=run_reference),
}


def first_that_runs(inputs: Inputs) -> str:
    """What impl="auto" chooses."""
    return next(name for name, i in IMPLEMENTATIONS.items() if i.why_not(inputs) is None)


def choose(inputs: Inputs, impl: str, *, callers: int = 1) -> str:
    """The name of what runs: the one asked for, or for "auto" the first that can.

    `callers` functions lie between the user's code and this call, for the place of a warning.
    """
    if impl == "auto":
        name = first_that_runs(inputs)
        if inputs.q.device.type == "cuda":
            warn_slow(name, stacklevel=callers + 3)
        return name
    if impl not in IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in ("auto", *IMPLEMENTATIONS))
        raise ValueError(f"impl must be one of {names}, got {impl!r}")
    if (reason := IMPLEMENTATIONS[impl].why_not(inputs)) is not None:
        raise ValueError(f"impl={impl!r} cannot run this: {reason}")
    return impl


def dispatch(inputs: Inputs, impl: str) -> RecurrentOutput:
    """Run the chosen implementation."""
    return IMPLEMENTATIONS[choose(inputs, impl, callers=2)].run(inputs)


_warned: set[str] = set()


def warn_slow(name: str, stacklevel: int) -> None:
    """Say once that a GPU runs a path without GPU kernels, and why."""
    if name not in _warned and not torch.compiler.is_compiling():
        _warned.add(name)
        warnings.warn(
            f"deltarule runs impl={name!r} on a CUDA device: this version has no GPU kernels",
            stacklevel=stacklevel,
        )
