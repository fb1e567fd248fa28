"""Eager calls of `delta_rule` and `dplr` like one before: straight to the launches recorded of it.

What was checked, chosen and planned for a call holds for every call of its kind. Where nothing has
to be told of a call (no backward, compiler, transform or mode), it is its launches alone.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.registered import recording_of
from deltarule.ops.delta_rule.triton.tile_sizes import recordings, remember
from deltarule.ops.delta_rule.verdicts import anything_failed
from deltarule.ops.eager import nothing_watches
from deltarule.ops.runtime.kinds import Kind, kind_of
from deltarule.shapes import RecurrentOutput

# What runs the Triton kernels.
IMPLS = ("auto", "triton")


def eager_kind(
    q: Any, *tensors: Any, n_steps: object, scale: object, normalize_qk: object,
    batch_invariant: object, impl: object,
) -> Kind | None:  # fmt: skip
    """The kind of a call, before any check of it; None if it may be more than its launches.

    `tensors` are the others of `Inputs`, in order.
    """
    if not isinstance(q, Tensor) or not q.is_cuda or impl not in IMPLS or not nothing_watches():
        return None
    if torch.autograd.forward_ad._current_level >= 0 or anything_failed():
        return None
    # 1, 1.0 and True are equal, and not all of them pass the checks.
    numbers = type(n_steps) is int and (scale is None or type(scale) is float)
    if not numbers or type(normalize_qk) is not bool or type(batch_invariant) is not bool:
        return None
    kind = kind_of((q, *tensors), n_steps, scale, normalize_qk, batch_invariant)
    if kind and torch.is_grad_enabled() and any(x.requires_grad for x in kind.given):
        return None
    return kind


def repeated(kind: Kind | None) -> RecurrentOutput | None:
    """The outputs of one more call of the kind, where its launches are known."""
    found = None if kind is None else recordings.get(kind.key)
    if found is None or (outputs := found.repeated(kind)) is None:
        return None
    return RecurrentOutput(outputs[0], outputs[1])


def remembered(kind: Kind | None, inputs: Inputs, output: RecurrentOutput) -> RecurrentOutput:
    """The output, after the launches of its call, if they were recorded, are known by its kind."""
    # Where nothing was recorded, there may be no Triton to ask.
    if kind is not None and recordings and (found := recording_of(inputs)) is not None:
        remember(kind.key, found)
    return output
