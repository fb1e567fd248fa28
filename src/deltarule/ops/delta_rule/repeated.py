"""Eager calls that repeat an earlier one, which go straight to its recorded launches.

What was checked, chosen and planned for a call holds for every call of its key. Without a compiler,
a transform or a mode, such a call is its launches alone; where a backward may follow, they are the
forward of a plain autograd function.
"""

from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.implementations import recurrence
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.dispatch import ONCE, CallKey, is_plain_eager, recordings, remember
from deltarule.ops.operators import differentiated, direct, is_spent
from deltarule.shapes import RecurrentOutput

# What runs the Triton kernels.
IMPLS = ("auto", "triton")
# Triton is an extra, imported where it runs.
kernels = cache(partial(import_module, "deltarule.ops.delta_rule.triton.passes"))


class Repeated(torch.autograd.Function):
    """Recorded launches in place of a forward and, where there are any, of its backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *given, (recording, key, ctx.numbers) = args
        outputs = recording.repeated(key)
        if outputs is None:
            outputs = recurrence.run_forward((*given, *ctx.numbers))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(outputs[2], *given)
        ctx.known, ctx.addresses = recording, [outputs[2].data_ptr(), *key.addresses]
        ctx.lends = not torch.cuda.is_current_stream_capturing()
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        d_o, d_final = gradients
        # Read once: activation checkpointing computes it again for a single reading.
        kept, found = ctx.saved_tensors, None
        # The final state rarely has a gradient.
        alone = d_final is None and not torch.is_grad_enabled() and is_plain_eager()
        if alone and type(d_o) is Tensor and (known := launches_back(ctx, kept, d_o)):
            found = known[0].repeated(known[1])
        if found is None:
            found = recurrence.derivatives(ctx, kept, gradients)
        return *found[:8], None, None


apply = direct(Repeated)


def launches_back(ctx: Any, kept: Sequence[Tensor], d_o: Tensor) -> tuple[Any, CallKey] | None:
    """The launches of a backward, and their key: with those of the forward if all lies as there."""
    saved, *given = kept
    tensors = [saved, *[x for x in given if x is not None]]
    addresses = [x.data_ptr() for x in tensors]
    spent = is_spent(ctx)
    kind = spent, d_o.dtype, d_o.shape, d_o.stride()
    as_it_was = addresses == ctx.addresses
    if as_it_was and (known := ctx.known.backward.get(kind)) is not None:
        places = [*addresses[1:], d_o.data_ptr(), addresses[0]]
        return known, CallKey(kind, [*tensors[1:], d_o, saved], places)
    own = kernels().gradient_stages.recording(*given, *ctx.numbers[:4], d_o, None, saved, spent)
    if own is not None and as_it_was:
        ctx.known.backward[kind] = own[0]
    return own


def eager_key(
    tensors: Sequence[Any], options: tuple[Any, ...], impl: object, save_states: bool
) -> CallKey | None:
    """The key of a call on a GPU before any check of it; None if launches may not be enough.

    `tensors` and `options` are the fields of `Inputs`, in order.
    """
    # In this order: compiled code reads no recordings; where there are none, Triton may be missing.
    if not is_plain_eager() or not recordings or impl not in IMPLS:
        return None
    n_steps, scale, normalize_qk, batch_invariant = options
    # 1, 1.0 and True are equal, and not all of them pass the checks.
    numbers = type(n_steps) is int and (scale is None or type(scale) is float)
    if not numbers or type(normalize_qk) is not bool or type(batch_invariant) is not bool:
        return None
    training = differentiated(tensors[:8])
    if (training and not save_states) or torch.autograd.forward_ad._current_level >= 0:
        return None
    return kernels().forward_stages.key(*tensors, *options, training)


def repeated(
    key: CallKey, tensors: Sequence[Any], options: tuple[Any, ...]
) -> RecurrentOutput | None:
    recording = recordings.get(key.key)
    if recording is None or recording is ONCE:
        return None
    # The last part of an `eager_key`: whether a backward may follow.
    if key.key[-1]:
        n_steps, scale, *flags = options
        scale = tensors[0].shape[3] ** -0.5 if scale is None else scale
        numbers = n_steps, scale, *flags, True, "triton"
        return RecurrentOutput(*apply(*tensors, (recording, key, numbers)))
    outputs = recording.repeated(key)
    return None if outputs is None else RecurrentOutput(outputs[0], outputs[1])


def remember_launches(key: CallKey, tensors: Sequence[Any], inputs: Inputs) -> None:
    """Keep the launches of a call, if they were recorded, by its key before any check."""
    training = key.key[-1]
    known = kernels().forward_stages.recording(*inputs, training)
    # A constant decay has its gradient from that of the decay of every token.
    if known is not None and (not training or inputs.log_decay is tensors[6]):
        remember(recordings, key.key, known[0])
