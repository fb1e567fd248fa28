"""What runs `delta_rule` and `dplr`: one registered operator, and the table that impl= reads.

The operator's backend is an argument: its forward and backward are plain functions of `Inputs`.
What `deltarule doctor` found wrong on this machine is refused.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch import passes as torch_passes
from deltarule.ops.delta_rule.triton.tile_sizes import power_of_two
from deltarule.ops.dispatch import (
    Implementation,
    Table,
    always,
    constant_when_compiled,
    triton_missing,
    without_autocast,
)
from deltarule.ops.folding import Fold
from deltarule.ops.registration import Gradients, Operator, Rules, differentiated
from deltarule.ops.runtime.machine import findings_file, load_findings
from deltarule.shapes import RecurrentOutput


class Backend(NamedTuple):
    """Forward, backward, and the shape of the states that the forward saves for the backward."""

    forward: Callable[[Inputs, bool], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor | None, Inputs, Tensor], tuple[Tensor | None, ...]]
    saved_shape: Callable[[Inputs], tuple[int, ...]]


@cache
def _triton() -> Any:
    """The kernels in Triton, which is an extra: imported where it runs."""
    from deltarule.ops.delta_rule.triton import passes

    return passes


BACKENDS = {
    "torch": Backend(torch_passes.forward, torch_passes.backward, torch_passes.chunk_states_shape),
    "triton": Backend(
        lambda *given: _triton().forward(*given),
        lambda *given: _triton().backward(*given),
        lambda *given: _triton().saved_shape(*given),
    ),
    # Its backward is that of a forward that saved nothing.
    "gluon": Backend(
        lambda inputs, save: _triton().fused_forward(inputs),
        lambda *given: _triton().backward(*given),
        lambda inputs: (0, *inputs.state_shape[1:]),
    ),
}


def recording_of(inputs: Inputs, save: bool = False) -> Any:
    """The recorded launches of a forward, if the Triton kernels ran it twice."""
    return _triton().recording_of(inputs, save)


def forward(inputs: Inputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states saved for the backward: none without `save`."""
    return BACKENDS[backend].forward(inputs, save)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: Inputs,
    save: bool, backend: str,
) -> Gradients:  # fmt: skip
    """Gradients by the eight tensors from q to initial_state."""
    d_o, d_final = gradients
    d_o = inputs.v.new_zeros(inputs.output_shape) if d_o is None else d_o.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    return BACKENDS[backend].backward(d_o, d_final, inputs, saved[0])


def fake(inputs: Inputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and types of what the forward returns."""
    shape = BACKENDS[backend].saved_shape(inputs) if save else (0, *inputs.state_shape[1:])
    return (
        inputs.v.new_empty(inputs.output_shape),
        inputs.q.new_empty(inputs.state_shape, dtype=inputs.dtype),
        inputs.q.new_empty(shape, dtype=inputs.dtype),
    )


def fold_axis(name: str, x: Tensor, packed: bool) -> int:
    """Rows fold into the batch; packed sequences follow each other in its one row."""
    return int(packed and name not in ("initial_state", "final"))


def repeated_offsets(cu_seqlens: Tensor, size: int) -> Tensor:
    """Those of the packed sequences, `size` times one after the other."""
    lengths = cu_seqlens.diff().repeat(size)
    return torch.cat([cu_seqlens[:1], lengths.cumsum(0, dtype=cu_seqlens.dtype)])


OTHERWISE = 'use impl="reference"'
recurrence_operator: Operator[Inputs] = Operator(
    "recurrence", Inputs, forward, backward, fake, options={"save": bool, "backend": str},
    returned=3, rules=Rules(2, (2,), Inputs._fields[:8], otherwise=OTHERWISE),
    fold=Fold(fold_axis, repeated_offsets, ("o", "final")),
)  # fmt: skip


def recurrence(inputs: Inputs, backend: str, save_states: bool) -> RecurrentOutput:
    """Request the registered operator, saving states only where asked and a backward may follow."""
    save = (
        save_states
        and differentiated(inputs[:8])
        # The chunks of a folded batch lie in another order than those of its parts.
        and not torch._C._are_functorch_transforms_active()
    )
    return RecurrentOutput(*recurrence_operator(*inputs, save, backend))


# The sizes that the Triton kernels are made for.
MAX_KEY_CHANNELS, MAX_VALUE_CHANNELS = 256, 512


class Request(NamedTuple):
    """A call of `delta_rule` or `dplr`, and whether its backward finds the chunks' states saved."""

    inputs: Inputs
    save_states: bool = True


def why_not_triton(call: Request) -> str | None:
    """What the Triton kernels over chunks cannot do."""
    q, v = call.inputs.q, call.inputs.v
    if q.device.type != "cuda":
        return f"Triton needs CUDA tensors, and q is on {q.device}"
    # torch.compile cannot trace find_spec; compiled GPU code always has Triton.
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


def run_triton(call: Request) -> RecurrentOutput:
    """Chunks in Triton, with a backward of its own."""
    return recurrence(call.inputs, "triton" if call.inputs.q.numel() else "torch", call.save_states)


def why_not_gluon(call: Request) -> str | None:
    """What the fused forward in Gluon, or its backward in Triton, cannot do."""
    if (reason := why_not_triton(call)) is not None:
        return reason
    from deltarule.ops.delta_rule.gluon.stage import why_not

    return why_not(call.inputs)


def run_gluon(call: Request) -> RecurrentOutput:
    """The forward as one warp-specialised kernel, and the backward of the chunks in Triton."""
    return recurrence(call.inputs, "gluon" if call.inputs.q.numel() else "torch", False)


def run_torch(call: Request) -> RecurrentOutput:
    """Chunks in PyTorch, with a backward of its own: any device."""
    return recurrence(call.inputs, "torch", call.save_states)


def run_reference(call: Request) -> RecurrentOutput:
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
IMPLEMENTATIONS: Table[Request, RecurrentOutput] = {
    "triton": Implementation(why_not=why_not_triton, run=run_triton),
    "gluon": Implementation(why_not=why_not_gluon, run=run_gluon),
    "torch": Implementation(why_not=always, run=run_torch),
    "reference": Implementation(why_not=always, run=run_reference),
}


# What the doctor found wrong, by the name of a configuration.
KIND = "doctor"


def configuration_name(inputs: Inputs) -> str:
    """A name for all calls that run the same compiled kernels, up to packing and unit norm.

    Examples:
        >>> import torch
        >>> q = torch.zeros(1, 4, 2, 100)
        >>> call = Inputs(q, q, q, None, None, None, None, None, None, 1, 1.0, False, False)
        >>> configuration_name(call)
        'erase none, decay none, n_steps 1, float32, K to 128, V to 128'
    """
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    return (
        f"erase {inputs.erase}, decay {inputs.decay}, n_steps {inputs.n_steps}, {dtype}, "
        f"K to {power_of_two(inputs.q.shape[-1])}, V to {power_of_two(inputs.v.shape[-1])}"
    )


def refusal(inputs: Inputs) -> str | None:
    """Why the doctor's findings forbid this call; None if they do not."""
    return refusal_of(configuration_name(inputs)) if anything_failed() else None


@constant_when_compiled
def anything_failed() -> bool:
    """Whether there is any failure to look for: mostly there is none."""
    return bool(failures())


@constant_when_compiled
def refusal_of(name: str) -> str | None:
    """The reason against one configuration, from the file of this machine."""
    if (error := failures().get(name)) is None:
        return None
    return (
        f"`deltarule doctor` found the kernels of ({name}) wrong on this GPU: {error}; it is kept "
        f'in {findings_file(KIND)}: use impl="torch", or another version of Triton'
    )


@cache
def failures() -> dict[str, str]:
    """Names of the configurations that failed on this machine, with their errors."""
    return {
        name: str(verdict.get("error"))
        for name, verdict in load_findings(KIND).items()
        if isinstance(verdict, dict) and not verdict.get("passed")
    }
