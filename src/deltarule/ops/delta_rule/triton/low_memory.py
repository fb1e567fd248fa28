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
from deltarule.ops.delta_rule.triton import stages_head
from deltarule.ops.delta_rule.triton.plan import Layout, Plan, Scores, Shapes, layout, views
from deltarule.ops.delta_rule.triton.segments import segment_count
from deltarule.ops.delta_rule.triton.stages_scan import (
    WHOLE,
    Slab,
    first_states,
    last_gradients,
    scan_back,
    scan_through,
)

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


def slabs_of(inputs: Inputs, plan: Plan, again: bool) -> Slabs:
    """As many slabs as are worth it, from the sizes alone; `again`: of S and E besides.

    Whoever keeps the states has chosen speed: cutting takes 3 to 10 % of the time on an H200.
    """
    whole = Slabs("none", 1, plan.chunks, plan.chunks)
    if not again or inputs.by_channel or plan.chunks == 0:
        return whole
    size = nbytes(own_shapes(inputs, plan, plan.chunks, again))
    programs = (
        plan.chunks
        * plan.sizes["H"]
        * stages_head.slices(plan.once(stages_head.gradients_launch, inputs))
    )
    kind, longest, stretches = stretches_of(inputs, plan)
    most = min(longest, size // LEAST_BYTES, programs // LEAST_PROGRAMS)
    if kind == "row":
        most = min(most, inputs.sequences * plan.sizes["HV"] // LEAST_SCANS)
    # Beside a slab there are the states at the starts of all: least where they are as much.
    most = min(most, math.isqrt(size // (4 * stretches * math.prod(inputs.state_shape[1:]))))
    cut = cut_into(inputs, plan, max(most, 1))
    # Short packed sequences leave most of their segments' places empty.
    return cut if most > 1 and cut.slots < plan.chunks else whole


def cut_into(inputs: Inputs, plan: Plan, parts: int) -> Slabs:
    """So many slabs, or fewer where the last would be empty."""
    kind, longest, stretches = stretches_of(inputs, plan)
    chunks = -(-longest // parts)
    return Slabs(kind, -(-longest // chunks), chunks, chunks * (1 if kind == "row" else stretches))


def stretches_of(inputs: Inputs, plan: Plan) -> tuple[str, int, int]:
    """What is cut, the chunks of one of them, and how many there are: sequences, or segments."""
    if plan.per_segment:
        return "stretch", plan.per_segment, segment_count(inputs, plan)
    if inputs.cu_seqlens is not None:
        return "row", plan.chunks, inputs.sequences
    return "stretch", -(-inputs.q.shape[1] // plan.sizes["CT"]), inputs.sequences


def own_shapes(inputs: Inputs, plan: Plan, slots: int, again: bool) -> Shapes:
    """What the backward keeps of each chunk of a slab: D, X, parts of dlog_decay (and S and E)."""
    (_, heads, value_size, key_size), dtype = inputs.state_shape, inputs.q.dtype
    states = slots, heads, value_size, key_size
    errors = slots, heads, plan.sizes["BT"], value_size
    shapes: Shapes = {"d_states": (states, dtype)}
    if inputs.beta is not None:
        shapes["d_errors"] = errors, dtype
    if inputs.log_decay is not None:
        kernel = plan.once(stages_head.gradients_launch, inputs)
        parts = stages_head.slices(kernel) + stages_head.float32_decays(inputs)
        shapes["parts"] = (parts, slots, heads, 4, plan.sizes["BT"]), torch.float32
    if again:
        shapes["states"] = states, dtype
        if inputs.beta is not None:
            shapes["errors"] = errors, dtype
    return shapes


def nbytes(shapes: Shapes) -> int:
    """Of buffers of these shapes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def own_layout(inputs: Inputs, plan: Plan, slots: int, again: bool) -> Layout:
    """Where it lies."""
    return layout(own_shapes(inputs, plan, slots, again))


def slab_starts(
    inputs: Inputs, plan: Plan, cut: Slabs, scores: Scores, buffers: dict[str, Tensor]
) -> list[Tensor | None]:
    """The states at the slabs' starts, one tensor of all stretches for each slab."""
    start, split, places = inputs.initial_state, "none", inputs.sequences
    if plan.per_segment:
        start = first_states(inputs, plan, scores, buffers["ends"])
        split, places = "starts", len(start)
    starts = [start]
    for number in range(cut.parts - 1):
        end = inputs.q.new_empty(places, *inputs.state_shape[1:], dtype=torch.float32)
        slab = cut.slab(number)
        scan_through(inputs, plan, scores, split, places, starts[-1], end, None, {}, slab)
        starts.append(end)
    return starts


def gradients_in_slabs(
    inputs: Inputs, plan: Plan, cut: Slabs, scores: Scores, buffers: dict[str, Tensor],
    d_o: Tensor, d_final: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients by the eight tensors from q to initial_state; decay none or per head.

    `buffers` has S and E of all chunks, or they are computed again.
    """
    again, x = "states" not in buffers, inputs.q
    starts = slab_starts(inputs, plan, cut, scores, buffers) if again else []
    d_initial = torch.empty(inputs.state_shape, dtype=torch.float32, device=x.device)
    split, places, d_end, carry = "none", inputs.sequences, d_final, d_initial
    if plan.per_segment:
        d_end = last_gradients(inputs, plan, scores, d_o, d_final, buffers["ends"])
        split, places, carry = "starts", len(d_end), d_end
    own_places = plan.once(own_layout, inputs, cut.slots, again)
    own = views(torch.empty(own_places.elements, dtype=torch.float32, device=x.device), own_places)
    found = stages_head.new_gradients(inputs)
    d_v = found.d_v if stages_head.scan_back_has_values(inputs, plan) else None
    spare = torch.empty_like(carry) if again else None
    for number in reversed(range(cut.parts)):
        slab = cut.slab(number)
        if spare is not None:
            # What comes out at the slab's end, nobody needs.
            start = starts.pop()
            scan_through(inputs, plan, scores, split, places, start, spare, None, own, slab)
        d_start = carry if number else d_initial
        scan_back(inputs, plan, scores, d_o, split, places, d_end, d_start, own, slab, d_v)
        stages_head.add_gradients(inputs, plan, cut.slots, buffers, own, d_o, found, slab)
        d_end = d_start
    stages_head.through_norm(inputs, plan, found)
    return found.d_q, found.d_k, found.d_v, found.d_beta, None, None, found.d_decay, d_initial
