"""The backward window after window, so that what it keeps of each chunk exists for a few at a time.

    each window of chunks, from the last:    D at its end -> next_state_backward -> D at its start
                                             gradients of its chunks

The same numbers come out as without windows: D goes from one to the next in float32, as it stays in
registers otherwise. What the forward did not keep is computed again, S and E too, from the states
at the windows' starts. The backward is cut where the states are not kept, which is the choice of
less memory over less time.

A window has the same chunks of every sequence or, where sequences are split, of every segment. Of
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
    Window,
    layout,
    views,
)
from deltarule.ops.delta_rule.triton.segments import segment_count

# A window keeps at least so much, and its launches have so many programs: fewer cost time, and gain
# little. Those of the scan over whole packed sequences are counted as if all were as long.
LEAST_BYTES = 64 * 2**20
LEAST_PROGRAMS, LEAST_SCANS = 1024, 128


class Windows(NamedTuple):
    """How often the backward is cut, and into what: `chunks` of a stretch, `slots` of all."""

    kind: str
    parts: int
    chunks: int
    slots: int

    def window(self, number: int) -> Window:
        """One of them, as the kernels know it."""
        return WHOLE if self.parts == 1 else Window(self.kind, number, self.chunks)


def windows_of(call: Call, again: bool) -> Windows:
    """As many windows as are worth it, from the sizes alone; `again`: of S and E besides.

    Whoever keeps the states has chosen speed: cutting takes 3 to 10 % of the time on an H200.
    """
    inputs, plan = call.inputs, call.plan
    whole = Windows("none", 1, plan.chunks, plan.chunks)
    if not again or inputs.by_channel or plan.chunks == 0:
        return whole
    size = nbytes(own_shapes(call, plan.chunks, again))
    programs = plan.chunks * plan.sizes["H"] * stages.slices(call)
    kind, longest, stretches = stretches_of(inputs, plan)
    most = min(longest, size // LEAST_BYTES, programs // LEAST_PROGRAMS)
    if kind == "row":
        most = min(most, inputs.sequences * plan.sizes["HV"] // LEAST_SCANS)
    # Beside a window there are the states at the starts of all: least where they are as much.
    most = min(most, math.isqrt(size // (4 * stretches * math.prod(inputs.state_shape[1:]))))
    cut = cut_into(call, max(most, 1))
    # Short packed sequences leave most of their segments' places empty.
    return cut if most > 1 and cut.slots < plan.chunks else whole


def cut_into(call: Call, parts: int) -> Windows:
    """So many windows, or fewer where the last would be empty."""
    kind, longest, stretches = stretches_of(call.inputs, call.plan)
    chunks = -(-longest // parts)
    return Windows(
        kind, -(-longest // chunks), chunks, chunks * (1 if kind == "row" else stretches)
    )


def stretches_of(inputs: Inputs, plan: Plan) -> tuple[str, int, int]:
    """What is cut, the chunks of one of them, and how many there are: sequences, or segments."""
    if plan.per_segment:
        return "stretch", plan.per_segment, segment_count(inputs, plan)
    if inputs.cu_seqlens is not None:
        return "row", plan.chunks, inputs.sequences
    return "stretch", -(-inputs.q.shape[1] // plan.sizes["CT"]), inputs.sequences


def own_shapes(call: Call, slots: int, again: bool) -> Shapes:
    """What the backward keeps of a window's chunks: D, X, parts of dlog_decay (and S and E)."""
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


def window_starts(call: Call, cut: Windows) -> list[Tensor | None]:
    """The states at the windows' starts, one tensor of all stretches for each window."""
    start, split, places = call.inputs.initial_state, "none", call.inputs.sequences
    if call.plan.per_segment:
        start = stages.first_states(call)
        split, places = "starts", len(start)
    starts = [start]
    for number in range(cut.parts - 1):
        end = call.empty((places, *call.inputs.state_shape[1:]))
        stages.scan_through(call, split, places, starts[-1], end, window=cut.window(number))
        starts.append(end)
    return starts


def gradients_in_windows(call: Call, cut: Windows) -> None:
    """Leave the gradients by the inputs and the initial state; decay none or per head.

    The call has S and E of all chunks, or they are computed again.
    """
    again = call["states"] is None
    starts = window_starts(call, cut) if again else []
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
        window = cut.window(number)
        if spare is not None:
            # What comes out at the window's end, nobody needs.
            stages.scan_through(call, split, places, starts.pop(), spare, own=own, window=window)
        d_start = carry if number else d_initial
        stages.scan_back(call, split, places, d_end, d_start, own, d_v, window)
        stages.add_gradients(call, cut.slots, own, window)
        d_end = d_start
    if call.inputs.normalize_qk and stages.slices(call) > 1:
        stages.through_norm(call)
    call.values |= {"d_initial": d_initial}
