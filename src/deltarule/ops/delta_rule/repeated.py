"""Eager calls like one before, which go straight to the launches recorded of it.

What was checked, chosen and planned for a call holds for every call of its kind. Where nothing has
to be told of a call (no compiler, transform or mode), it is its launches alone; where a backward
may follow, they stand in the place of the forward of a plain autograd function.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.implementations import recurrence
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.dispatch import CallKey, call_key, is_plain_eager, recordings, remember
from deltarule.ops.operators import differentiated
from deltarule.ops.runtime.machine import anything_failed
from deltarule.shapes import RecurrentOutput

# What runs the Triton kernels.
IMPLS = ("auto", "triton")
# Before the key of calls that a backward may follow.
TRAINING = "training"


class Training(NamedTuple):
    """The launches of a forward that saves, and its arguments after the tensors."""

    recording: Any
    numbers: tuple[Any, ...]
    # Triton is an extra, imported where it runs.
    repeated_gradients: Callable[..., tuple[Tensor | None, ...] | None]


class Repeated(torch.autograd.Function):
    """The launches of a forward in its place, and in that of its backward those of the last one."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, kind, known = args
        outputs = known.recording.repeated(kind)
        if outputs is None:
            outputs = recurrence.run_forward((*tensors, *known.numbers))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(outputs[2], *tensors)
        ctx.numbers, ctx.repeated_gradients = known.numbers, known.repeated_gradients
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        d_o, d_final = gradients
        # Once: activation checkpointing computes it again, and gives it away but once.
        kept, found = ctx.saved_tensors, None
        # Mostly nobody asks for the final state's gradient.
        if d_o is not None and d_final is None and not torch.is_grad_enabled() and is_plain_eager():
            saved, *tensors = kept
            found = ctx.repeated_gradients(tensors, ctx.numbers[:4], d_o, saved)
        if found is None:
            found = recurrence.derivatives(ctx, kept, gradients)
        return *found[:8], None, None, None


# Past the search for transforms: where there are any, nobody calls it.
apply: Any = super(torch.autograd.Function, Repeated).apply


def eager_kind(tensors: Sequence[Any], options: tuple[Any, ...], impl: object) -> CallKey | None:
    """The kind of a call on a GPU before any check of it; None if it may be more than launches.

    `tensors` and `options` are the fields of `Inputs`, in order.
    """
    n_steps, scale, normalize_qk, batch_invariant = options
    if impl not in IMPLS or not is_plain_eager():
        return None
    if torch.autograd.forward_ad._current_level >= 0 or anything_failed():
        return None
    # 1, 1.0 and True are equal, and not all of them pass the checks.
    numbers = type(n_steps) is int and (scale is None or type(scale) is float)
    if not numbers or type(normalize_qk) is not bool or type(batch_invariant) is not bool:
        return None
    return call_key(tensors, *options)


def repeated(kind: CallKey, tensors: Sequence[Any], save_states: bool) -> RecurrentOutput | None:
    """The outputs of one more call of the kind, where its launches are known."""
    if differentiated(kind.given):
        found = recordings.get((TRAINING, kind.key)) if save_states else None
        if found is None:
            return None
        return RecurrentOutput(*apply(*tensors, kind, found))
    found = recordings.get(kind.key)
    if found is None or (outputs := found.repeated(kind)) is None:
        return None
    return RecurrentOutput(outputs[0], outputs[1])


def remember_launches(
    kind: CallKey, tensors: Sequence[Any], inputs: Inputs, save_states: bool
) -> None:
    """Know the launches of a call, if they were recorded, by its kind."""
    # Where nothing was recorded, there may be no Triton to ask.
    if not recordings:
        return
    from deltarule.ops.delta_rule.triton.passes import recording_of, repeated_gradients

    training = differentiated(kind.given)
    if (found := recording_of(inputs, training and save_states)) is None:
        return
    if not training:
        remember(recordings, kind.key, found)
    # A constant decay has its gradient from that of the decay of every token.
    elif save_states and inputs.log_decay is tensors[6]:
        known = Training(found, (*inputs[9:], True, "triton"), repeated_gradients)
        remember(recordings, (TRAINING, kind.key), known)
