"""The loops that say what the functions on a pool mean: a row, a stretch of tokens at a time."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.definition import Run, stretch, taken

# Of the functions beside this file, which come with checks that are not this file's.
Call = Any


def prefill(run: Run, call: Call) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the state before each border; the pool is written."""
    inputs, state, null_index = call.inputs, call.state, call.null_index
    writes = call.writes.tolist()
    borders = [] if call.borders is None else call.borders.tolist()
    o = inputs.v.new_zeros(inputs.output_shape)
    before: dict[int, Tensor] = {}
    starts = [taken(state, slot, null_index) for slot in call.reads.tolist()]
    for row, (first, last) in enumerate(pairwise(call.offsets.tolist())):
        current = starts[row].to(inputs.dtype)
        inside = sorted({x for x in borders if first <= x < last} | {first, last})
        for start, end in pairwise(inside):
            before[start] = current
            part = run(stretch(inputs, start, end, current))
            assert part.final_state is not None
            o.view(-1, *o.shape[2:])[start:end] = part.o[0]
            current = part.final_state[0]
        if writes[row] > null_index:
            state[writes[row]] = current.to(state.dtype)
    return o, [before[x] for x in borders]


def convolution(call: Call) -> Tensor:
    """[T, D] before its activation; the pool [slots, R, D] of earlier inputs is written."""
    x, weight, bias, state = call.x.flatten(0, 1), call.weight, call.bias, call.state
    reads, slots, null_index = call.reads.tolist(), call.writes.tolist(), call.null_index
    accepted, taps = call.accepted, weight.shape[1]
    outputs = []
    for row, (first, last) in enumerate(pairwise(call.offsets.tolist())):
        begin = 0 if accepted is None else int(accepted[row]) - 1
        held = taken(state, reads[row], null_index)
        seen = torch.cat([held[begin : begin + taps - 1].to(x.dtype), x[first:last]])
        for t in range(last - first):
            y = (seen[t : t + taps] * weight.T.to(x.dtype)).sum(0)
            outputs.append(y if bias is None else y + bias.to(x.dtype))
        if slots[row] > null_index:
            # What stays: all that a later call may begin from.
            left = seen[last - first :] if accepted is None else seen[1:]
            if last > first:
                state[slots[row], : len(left)] = left.to(state.dtype)
    return torch.stack(outputs) if outputs else x.clone()
