"""What runs `delta_rule` and `dplr`: one registered operator, and the table that impl= reads.

The operator's backend is an argument: its forward and backward are plain functions of `Inputs`.
What `deltarule doctor` found wrong on this machine is refused.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch import passes as torch_passes
from deltarule.ops.dispatch import (
    Implementation,
    Table,
    always,
    constant_when_compiled,
    why_no_triton,
    without_autocast,
)
from deltarule.ops.folding import MORE_ROWS
from deltarule.ops.operators import Backend, Recurrence
from deltarule.ops.runtime.machine import anything_failed, failures, findings_file
from deltarule.shapes import RecurrentOutput


@cache
def backend_of(name: str) -> Backend:
    """Triton is an extra, imported where it runs."""
    if name == "torch":
        chunked = torch_passes.chunked
        return Backend(torch_passes.forward, chunked.gradients, chunked.saved_shape)
    from deltarule.ops.delta_rule.triton import passes

    if name == "triton":
        return Backend(passes.forward, passes.backward, passes.saved_shape)
    from deltarule.ops.delta_rule.gluon import stage

    # Its backward is that of a forward that saved nothing.
    return Backend(
        stage.whole_forward, passes.backward, lambda inputs: (0, *inputs.state_shape[1:])
    )


recurrence = Recurrence("recurrence", Inputs, backend_of, 8, MORE_ROWS)

# The sizes that the Triton kernels are made for.
MAX_KEY_CHANNELS, MAX_VALUE_CHANNELS = 256, 512


class Request(NamedTuple):
    """A call of `delta_rule` or `dplr`, and whether its backward finds the chunks' states saved."""

    inputs: Inputs
    save_states: bool = True


def why_not_triton(call: Request) -> str | None:
    q, v = call.inputs.q, call.inputs.v
    if reason := why_no_triton("q", q):
        return reason
    if q.dtype == torch.float64:
        return "the Triton kernels compute in float32, and q is float64"
    if q.shape[3] > MAX_KEY_CHANNELS or v.shape[3] > MAX_VALUE_CHANNELS:
        return (
            f"the Triton kernels take K up to {MAX_KEY_CHANNELS} and V up to "
            f"{MAX_VALUE_CHANNELS}, got K = {q.shape[3]} and V = {v.shape[3]}"
        )
    return refusal_of(configuration_name(call.inputs)) if anything_failed() else None


@constant_when_compiled
def refusal_of(name: str) -> str | None:
    if (error := failures().get(name)) is None:
        return None
    return (
        f"`deltarule doctor` found the kernels of ({name}) wrong on this GPU: {error}; it is kept "
        f'in {findings_file()}: use impl="torch", or another version of Triton'
    )


def configuration_name(inputs: Inputs) -> str:
    """A name for all calls that run the same compiled kernels, up to packing and unit norm."""
    from deltarule.ops.delta_rule.triton.tile_sizes import power_of_two

    dtype = str(inputs.q.dtype).removeprefix("torch.")
    return (
        f"erase {inputs.erase}, decay {inputs.decay}, n_steps {inputs.n_steps}, {dtype}, "
        f"K to {power_of_two(inputs.q.shape[-1])}, V to {power_of_two(inputs.v.shape[-1])}"
    )


def why_not_gluon(call: Request) -> str | None:
    """What the fused forward in Gluon, or its backward in Triton, cannot do."""
    if (reason := why_not_triton(call)) is not None:
        return reason
    from deltarule.ops.delta_rule.gluon.stage import why_not

    return why_not(call.inputs)


def runs(backend: str, saves: bool = True) -> Callable[[Request], RecurrentOutput]:
    """What runs calls by a backend of the operator, and those without tokens in PyTorch."""

    def run(call: Request) -> RecurrentOutput:
        name = backend if call.inputs.q.numel() else "torch"
        return recurrence.run(call.inputs, name, saves and call.save_states)

    return run


def run_reference(call: Request) -> RecurrentOutput:
    """The definition, one token at a time, differentiable to any order."""
    given = call.inputs._asdict()
    del given["batch_invariant"]
    with without_autocast(call.inputs.q.device):
        return definition.delta_rule(**given)


# In the order in which impl="auto" prefers them. Of the one kernel in Gluon nothing is saved.
IMPLEMENTATIONS: Table[Request, RecurrentOutput] = {
    "triton": Implementation(why_not=why_not_triton, run=runs("triton")),
    "gluon": Implementation(why_not=why_not_gluon, run=runs("gluon", saves=False)),
    "torch": Implementation(why_not=always, run=runs("torch")),
    "reference": Implementation(why_not=always, run=run_reference),
}
