"""The backward slab after slab, so that what it keeps of each chunk exists for a few at a time.

    for each slab of chunks, from the last:    D at its end -> next_state_backward -> D at its start
                                               gradients of its chunks

The same numbers come out as without slabs: D goes from one to the next in float32, as it stays in
registers otherwise. What the forward did not keep is computed again, S and E too slab after slab,
from the states at the slabs' starts. It is cut where the states are not kept, which is the choice
of less memory over less time.

A slab has the same chunks of every sequence or, where sequences are split, of every segment. Of
packed sequences, whose lengths the host does not know, it has so many chunks of the row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import stages
from deltarule.ops.delta_rule.triton.plan import (
    WHOLE,
    Call,
    Layout,
    Plan,
    Shapes,
    Slab,
    layout,
    views,
)
from deltarule.ops.delta_rule.triton.segments import segment_count

# A slab keeps at least so much, and its launches have so many programs: fewer cost time, and gain
# little. Those of the scan over whole packed sequences are counted as if all were as long.
LEAST_BYTES = 64 * 2**20
LEAST_PROGRAMS, LEAST_SCANS = 1024, 128


class Slabs(NamedTuple):
    """How often the backward is cut, and into what: `chunks` of a stretch, `slots` of all."""

    kind: str
    parts: int
    chunks: int
    slots: int

    def slab(self, number: int) -> Slab:
        """One of them, as the kernels know it."""
        return WHOLE if self.parts == 1 else Slab(self.kind, number, self.chunks)


def slabs_of(call: Call, again: bool) -> Slabs:
    """As many slabs as are worth it, from the sizes alone; `again`: of S and E besides.

    Whoever keeps the states has chosen speed: cutting takes 3 to 10 % of the time on an H200.
    """
    inputs, plan = call.inputs, call.plan
    whole = Slabs("none", 1, plan.chunks, plan.chunks)
    if not again or inputs.by_channel or plan.chunks == 0:
        return whole
    size = nbytes(own_shapes(call, plan.chunks, again))
    programs = plan.chunks * plan.sizes["H"] * stages.slices(call)
    kind, longest, stretches = stretches_of(inputs, plan)
    most = min(longest, size // LEAST_BYTES, programs // LEAST_PROGRAMS)
    if kind == "row":
        most = min(most, inputs.sequences * plan.sizes["HV"] // LEAST_SCANS)
    # Beside a slab there are the states at the starts of all: least where they are as much.
    most = min(most, math.isqrt(size // (4 * stretches * math.prod(inputs.state_shape[1:]))))
    cut = cut_into(call, max(most, 1))
    # Short packed sequences leave most of their segments' places empty.
    return cut if most > 1 and cut.slots < plan.chunks else whole


def cut_into(call: Call, parts: int) -> Slabs:
    """So many slabs, or fewer where the last would be empty."""
    kind, longest, stretches = stretches_of(call.inputs, call.plan)
    chunks = -(-longest // parts)
    return Slabs(kind, -(-longest // chunks), chunks, chunks * (1 if kind == "row" else stretches))


def stretches_of(inputs: Inputs, plan: Plan) -> tuple[str, int, int]:
    """What is cut, the chunks of one of them, and how many there are: sequences, or segments."""
    if plan.per_segment:
        return "stretch", plan.per_segment, segment_count(inputs, plan)
    if inputs.cu_seqlens is not None:
        return "row", plan.chunks, inputs.sequences
    return "stretch", -(-inputs.q.shape[1] // plan.sizes["CT"]), inputs.sequences


def own_shapes(call: Call, slots: int, again: bool) -> Shapes:
    """What the backward keeps of each chunk of a slab: D, X, parts of dlog_decay (and S and E)."""
    inputs, rows = call.inputs, call.plan.sizes["BT"]
    (_, heads, value_size, key_size), dtype = inputs.state_shape, inputs.q.dtype
    states, errors = (slots, heads, value_size, key_size), (slots, heads, rows, value_size)
    shapes: Shapes = {"d_states": (states, dtype)}
    if inputs.beta is not None:
        shapes["d_errors"] = errors, dtype
    if inputs.log_decay is not None:
        parts = stages.slices(call) + stages.sums_pairs(inputs), slots, heads, 4, rows
        shapes["parts"] = parts, torch.float32
    if again:
        shapes["states"] = states, dtype
        if inputs.beta is not None:
            shapes["errors"] = errors, dtype
    return shapes


def nbytes(shapes: Shapes) -> int:
    """Of buffers of these shapes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def own_layout(call: Call, slots: int, again: bool) -> Layout:
    """Where it lies."""
    return layout(own_shapes(call, slots, again))


def slab_starts(call: Call, cut: Slabs) -> list[Tensor | None]:
    """The states at the slabs' starts, one tensor of all stretches for each slab."""
    start, split, places = call.inputs.initial_state, "none", call.inputs.sequences
    if call.plan.per_segment:
        start = stages.first_states(call)
        split, places = "starts", len(start)
    starts = [start]
    for number in range(cut.parts - 1):
        end = call.empty((places, *call.inputs.state_shape[1:]))
        stages.scan_through(call, split, places, starts[-1], end, slab=cut.slab(number))
        starts.append(end)
    return starts


def gradients_in_slabs(call: Call, cut: Slabs) -> None:
    """Leave the gradients by the inputs and the initial state; decay none or per head.

    The call has S and E of all chunks, or they are computed again.
    """
    again = call["states"] is None
    starts = slab_starts(call, cut) if again else []
    d_initial = call.empty(call.inputs.state_shape)
    split, places, d_end, carry = "none", call.inputs.sequences, call["d_final"], d_initial
    if call.plan.per_segment:
        d_end = carry = stages.last_gradients(call)
        split, places = "starts", len(d_end)
    own_places = call.once(own_layout, cut.slots, again)
    own = views(call.empty((own_places.elements,)), own_places)
    stages.new_gradients(call)
    d_v = call["d_v"] if stages.scan_back_has_values(call) else None
    spare = torch.empty_like(carry) if again else None
    for number in reversed(range(cut.parts)):
        slab = cut.slab(number)
        if spare is not None:
            # What comes out at the slab's end, nobody needs.
            stages.scan_through(call, split, places, starts.pop(), spare, own=own, slab=slab)
        d_start = carry if number else d_initial
        stages.scan_back(call, split, places, d_end, d_start, own, d_v, slab)
        stages.add_gradients(call, cut.slots, own, slab)
        d_end = d_start
    if call.inputs.normalize_qk and stages.slices(call) > 1:
        stages.through_norm(call)
    call.values |= {"d_initial": d_initial}
