"""The implementations of `delta_rule` and `dplr`, in the order that impl="auto" prefers."""

from typing import NamedTuple

import torch

from deltarule.ops.autocast import without_autocast
from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.registered import recurrence
from deltarule.ops.delta_rule.verdicts import refusal
from deltarule.ops.dispatch import Implementation, Table, always, choose, triton_missing
from deltarule.shapes import RecurrentOutput

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


def run_triton(call: Call) -> RecurrentOutput:
    """Chunks in Triton, with a backward of its own."""
    return recurrence(call.inputs, "triton" if call.inputs.q.numel() else "torch", call.save_states)


def why_not_gluon(call: Call) -> str | None:
    """What the fused forward in Gluon, or its backward in Triton, cannot do."""
    if (reason := why_not_triton(call)) is not None:
        return reason
    from deltarule.ops.delta_rule.gluon.stage import why_not

    return why_not(call.inputs)


def run_gluon(call: Call) -> RecurrentOutput:
    """The forward as one warp-specialised kernel, and the backward of the chunks in Triton."""
    return recurrence(call.inputs, "gluon" if call.inputs.q.numel() else "torch", False)


def run_torch(call: Call) -> RecurrentOutput:
    """Chunks in PyTorch, with a backward of its own: any device."""
    return recurrence(call.inputs, "torch", call.save_states)


def run_reference(call: Call) -> RecurrentOutput:
    """The definition, one token at a time, differentiable to any order."""
    inputs = call.inputs
    with without_autocast(inputs.q.device):
        return _reference(inputs)


def _reference(inputs: Inputs) -> RecurrentOutput:
    q, k, v, beta, a, b, log_decay, initial_state, cu_seqlens, *_ = inputs
    if a is not None and b is not None:
        return definition.dplr(
            q, k, v, a=a, b=b, log_decay=log_decay, scale=inputs.scale,
            initial_state=initial_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    return definition.delta_rule(
        q, k, v, beta=beta, log_decay=log_decay, n_steps=inputs.n_steps, scale=inputs.scale,
        normalize_qk=inputs.normalize_qk, initial_state=initial_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip


# In the order in which impl="auto" prefers them.
IMPLEMENTATIONS: Table[Call, RecurrentOutput] = {
    "triton": Implementation(why_not=why_not_triton, run=run_triton),
    "gluon": Implementation(why_not=why_not_gluon, run=run_gluon),
    "torch": Implementation(why_not=always, run=run_torch),
    "reference": Implementation(why_not=always, run=run_reference),
}


def dispatch(inputs: Inputs, impl: str, save_states: bool) -> RecurrentOutput:
    """Run the chosen implementation of `delta_rule` or `dplr`."""
    call = Call(inputs, save_states)
    return choose(IMPLEMENTATIONS, call, impl, inputs.q.device).run(call)
