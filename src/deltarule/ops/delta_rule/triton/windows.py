"""The backward window after window, so that what it keeps of each chunk exists for a few at a time.

    each window of chunks, from the last:    D at its end -> next_state_backward -> D at its start
                                             gradients of its chunks

The same numbers come out as without windows: D goes from one to the next in float32, as it stays
in registers otherwise. What the forward did not keep is computed again, S and E too, from the
states at the windows' starts. The backward is cut where the states are not kept, which is the
choice of less memory over less time: cutting takes 3 to 10 % of the time on an H200.

A window has the same chunks of every sequence or, where sequences are split, of every segment. Of
packed sequences, whose lengths the host does not know, it has so many chunks of the row.
"""

import math
from typing import NamedTuple

import torch

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.gradients import slices
from deltarule.ops.delta_rule.triton.plan import Call, Plan, Window, gradients_of, stretches
from deltarule.ops.delta_rule.triton.scan import scan_back, scan_through
from deltarule.ops.delta_rule.triton.segments import first_states, last_gradients

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
        return Window(self.kind, number, self.chunks)


def windows_of(call: Call) -> Windows | None:
    """The windows for these sizes, or None where one is best."""
    inputs, plan = call.inputs, call.plan
    if inputs.by_channel or plan.chunks == 0:
        return None
    shapes = gradients_of(call).own_shapes(call, plan.chunks, True)
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    programs = plan.chunks * plan.sizes["H"] * slices(call)
    kind, longest, stretches = stretches_of(inputs, plan)
    most = min(longest, size // LEAST_BYTES, programs // LEAST_PROGRAMS)
    if kind == "row":
        most = min(most, inputs.sequences * plan.sizes["HV"] // LEAST_SCANS)
    # Beside a window there are the states at the starts of all: least where they are as much.
    most = min(most, math.isqrt(size // (4 * stretches * math.prod(inputs.state_shape[1:]))))
    cut = cut_into(call, max(most, 1))
    # Short packed sequences leave most of their segments' places empty.
    return None if cut is None or cut.slots >= plan.chunks else cut


def cut_into(call: Call, parts: int) -> Windows | None:
    """So many windows, or fewer where the last would be empty; None where that leaves one."""
    kind, longest, stretches = stretches_of(call.inputs, call.plan)
    chunks = -(-longest // parts)
    parts = -(-longest // chunks)
    slots = chunks * (1 if kind == "row" else stretches)
    return Windows(kind, parts, chunks, slots) if parts > 1 else None


def stretches_of(inputs: Inputs, plan: Plan) -> tuple[str, int, int]:
    """What is cut, the chunks of one of them, and how many there are: sequences, or segments."""
    count = stretches(inputs, plan)
    if plan.per_segment:
        return "stretch", plan.per_segment, count
    if inputs.cu_seqlens is not None:
        return "row", plan.chunks, count
    return "stretch", -(-inputs.q.shape[1] // plan.sizes["CT"]), count


def backward(call: Call, cut: Windows) -> None:
    # The states at the windows' starts, one tensor of all stretches for each window.
    starts = [first_states(call) if call.plan.per_segment else call.inputs.initial_state]
    for number in range(cut.parts - 1):
        end = call.empty((stretches(call.inputs, call.plan), *call.inputs.state_shape[1:]))
        around = {"initial_state": starts[-1], "final_state": end}
        scan_through(call, around, cut.window(number))
        starts.append(end)
    d_end, carry = call["d_final"], call["d_initial"]
    if call.plan.per_segment:
        d_end = carry = last_gradients(call)
    stage = gradients_of(call, cut.window(0))
    own, spare = call.room(stage.own_shapes, cut.slots, True), torch.empty_like(carry)
    for number in reversed(range(cut.parts)):
        window = cut.window(number)
        # The state at the window's end is not needed.
        around = {"initial_state": starts.pop(), "final_state": spare}
        scan_through(call, own | around, window)
        d_start = carry if number else call["d_initial"]
        around = {"d_final": d_end, "d_initial": d_start, **stage.room_in_gradients(call)}
        scan_back(call, own | around, window)
        stage.add_gradients(call, own, window)
        d_end = d_start
