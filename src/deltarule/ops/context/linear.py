"""`delta_rule` and `dplr` with the transition of all their tokens: S before becomes S M + U.

Rows of a state do not see each other. So K more value channels, which write zeros, and whose rows
of the state start as I, take M through the same pass:

    rows of v        o_t with nothing before      U, the state after the last token
    rows of I                                     M = A_1 .. A_T

Without an erase M is diagonal, and the exponential of summed decays: no more channels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.shapes import RecurrentOutput, TransitionOutput

# An operator with all but its tensors and states given.
Operator = Callable[..., RecurrentOutput]


def with_transition(operator: Operator, given: dict[str, Any]) -> TransitionOutput:
    """Run an operator, and find what its tokens multiply a state by."""
    if given.get("beta") is None and given.get("a") is None:
        return TransitionOutput(*operator(**given), total_decay(given).exp())
    q, v, offsets = given["q"], given["v"], given.get("cu_seqlens")
    key_size, value_size, heads = q.shape[-1], v.shape[-1], v.shape[2]
    count = q.shape[0] if offsets is None else len(offsets) - 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = torch.eye(key_size, dtype=dtype, device=v.device).expand(count, heads, -1, -1)
    start = given.get("initial_state")
    if start is None:
        start = rows.new_zeros(count, heads, value_size, key_size)
    wide = given | {"v": F.pad(v, (0, key_size)), "return_state": True}
    output = operator(**wide | {"initial_state": torch.cat([start, rows], -2)})
    assert output.final_state is not None
    state, transition = output.final_state.split((value_size, key_size), -2)
    o = output.o[..., :value_size]
    return TransitionOutput(o, state if given["return_state"] else None, transition)


def total_decay(given: dict[str, Any]) -> Tensor:
    """The sum of the log decays of each sequence, [N, HV, K]; zeros where there is none."""
    q, decay, offsets = given["q"], given.get("log_decay"), given.get("cu_seqlens")
    dtype = torch.promote_types(q.dtype, torch.float32)
    decay = q.new_zeros((), dtype=dtype) if decay is None else decay.to(dtype)
    if 0 < decay.ndim < 4:
        decay = decay.unsqueeze(-1)
    decay = decay.expand(*q.shape[:2], given["v"].shape[2], q.shape[3])
    if offsets is None:
        return decay.sum(1)
    # Not by differences of running sums: a reset is -inf.
    sums = decay.new_zeros(len(offsets) - 1, *decay.shape[2:])
    place = torch.arange(q.shape[1], device=q.device)
    sequence = torch.searchsorted(offsets[1:].to(q.device, torch.int64), place, right=True)
    return sums.index_add(0, sequence, decay[0])
