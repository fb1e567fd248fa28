"""Eager calls of `delta_rule` and `dplr` like one before: straight to the launches recorded of it.

What was checked, chosen and planned for a call holds for every call of its kind. Where nothing has
to be told of a call (no compiler, transform or mode), it is its launches alone; where a backward
may follow, they stand in the place of the forward of a plain autograd function.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.implementations import (
    anything_failed,
    recording_of,
    recurrence_operator,
)
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.dispatch import nothing_watches
from deltarule.ops.registration import differentiated
from deltarule.ops.runtime.calls import CallKey, call_key, recordings, remember
from deltarule.shapes import RecurrentOutput

# What runs the Triton kernels.
IMPLS = ("auto", "triton")
# Before the key of calls that a backward may follow.
TRAINING = "training"


class Training(NamedTuple):
    """The launches of a forward that saves, and its arguments after the tensors."""

    recording: Any
    numbers: tuple[Any, ...]


def eager_kind(
    tensors: Sequence[Any], n_steps: object, scale: object, normalize_qk: object,
    batch_invariant: object, impl: object,
) -> CallKey | None:  # fmt: skip
    """The kind of a call, before any check of it; None if it may be more than its launches.

    `tensors` are those of `Inputs`, in order.
    """
    q = tensors[0]
    if not isinstance(q, Tensor) or not q.is_cuda or impl not in IMPLS or not nothing_watches():
        return None
    if torch.autograd.forward_ad._current_level >= 0 or anything_failed():
        return None
    # 1, 1.0 and True are equal, and not all of them pass the checks.
    numbers = type(n_steps) is int and (scale is None or type(scale) is float)
    if not numbers or type(normalize_qk) is not bool or type(batch_invariant) is not bool:
        return None
    return call_key(tensors, n_steps, scale, normalize_qk, batch_invariant)


def repeated(
    kind: CallKey | None, tensors: Sequence[Any], save_states: bool
) -> RecurrentOutput | None:
    """The outputs of one more call of the kind, where its launches are known."""
    if kind is None:
        return None
    if differentiated(kind.given):
        found = recordings.get((TRAINING, kind.key)) if save_states else None
        if found is None:
            return None
        run = partial(found.recording.repeated, kind)
        return RecurrentOutput(*recurrence_operator.apply(*tensors, *found.numbers, run))
    found = recordings.get(kind.key)
    if found is None or (outputs := found.repeated(kind)) is None:
        return None
    return RecurrentOutput(outputs[0], outputs[1])


def remembered(
    kind: CallKey | None, tensors: Sequence[Any], inputs: Inputs, output: RecurrentOutput,
    save_states: bool,
) -> RecurrentOutput:  # fmt: skip
    """The output, after the launches of its call, if they were recorded, are known by its kind."""
    # Where nothing was recorded, there may be no Triton to ask.
    if kind is None or not recordings:
        return output
    training = differentiated(kind.given)
    if (found := recording_of(inputs, training and save_states)) is None:
        return output
    if not training:
        remember(recordings, kind.key, found)
    # A constant decay has its gradient from that of the decay of every token.
    elif save_states and inputs.log_decay is tensors[6]:
        remember(recordings, (TRAINING, kind.key), Training(found, (*inputs[9:], True, "triton")))
    return output
