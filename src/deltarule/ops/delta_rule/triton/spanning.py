"""A forward and a backward in Triton that meet other processes half way.

Sequences are split into segments, as those that are few and long are anyway. All segments go from a
zero state to their ends, which with their transitions give U and M of the tokens here; from what
comes of the exchange, the states at the starts of the segments follow, and the main pass. Nothing
is computed twice. Between the two halves of a pass others may compute while messages travel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.context.exchange import Halves, applied, in_two
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes
from deltarule.ops.delta_rule.triton.plan import Call, Plan, blocks, make_plan
from deltarule.ops.delta_rule.triton.segments import leave_ends, leave_ends_back, segment_starts


class Joint:
    """Where the segments of one call meet the other processes: forwards, or backwards.

    `start` is the true states at the start of all sequences, once they are known. Without a `join`
    there is no other process: its kernels are only compiled, and what comes of them is nobody's.
    """

    def __init__(self, join: Any, start: Tensor | None = None) -> None:
        self.join, self.start = join, start

    def begin(self, call: Call) -> None:
        """Send what the segments leave of a zero state, and what they multiply one by."""
        leave_ends(call)
        if self.join is None:
            return
        rows, inputs, diagonal = call.inputs.v.shape[3], call.inputs, self.join.diagonal
        both = composed(self.segments(call, call["ends"], -1), rows, diagonal)
        end, transition = both[..., :rows, :], both[..., rows:, :]
        if inputs.initial_state is not None:
            end = end + applied(inputs.initial_state[-self.join.rows :], transition, diagonal)
        self.join.begin(end, transition)

    def states(self, call: Call) -> Tensor:
        if self.join is None:
            return call.empty(call.inputs.state_shape)
        if self.start is None:
            self.start = self.join.started(call.inputs)
        return self.start

    def begin_back(self, call: Call) -> None:
        """Send the gradient by the state before the first token here, as far as tokens here say."""
        self.d_ends = leave_ends_back(call)
        if self.join is None:
            return
        last = segment_starts(call, call["d_final"], self.d_ends, True)
        d_end, d_part, kept = (
            self.segments(call, x, 0)[:, 0] for x in (last, self.d_ends, call["ends"])
        )
        transition = kept[..., call.inputs.v.shape[3] :, :]
        back = transition if self.join.diagonal else transition.mT
        self.join.begin_back(applied(d_end, back, self.join.diagonal) + d_part)

    def gradients(self, call: Call) -> Tensor:
        """The gradients by the states at the end of all sequences."""
        d_final: Tensor = call["d_final"]
        return d_final if self.join is None else self.join.ended(d_final)

    def segments(self, call: Call, ends: Tensor, sequence: int) -> Tensor:
        """[B, segments, HV, ...] of every row, or of the first (0) or last (-1) packed sequence."""
        offsets = self.join.context.offsets
        if offsets is None:
            return ends.unflatten(0, (self.join.rows, -1))
        edges = self.join.context.edges
        size = call.plan.per_segment * call.plan.sizes["CT"]
        number = sequence % (len(edges) - 1)
        first = edges[number] // size + number
        count = max(blocks(edges[number + 1] - edges[number], size), 1)
        return ends[None, first : first + count]


def composed(parts: Tensor, rows: int, diagonal: bool) -> Tensor:
    """U (so many rows) and M below it, of segments [B, segments, HV, ...] one after the other.

    Pairs of neighbours at once, and then pairs of these.
    """
    while (even := parts.shape[1] // 2 * 2) > 0 and parts.shape[1] > 1:
        before, after = parts[:, :even:2], parts[:, 1:even:2]
        both = applied(before, after[..., rows:, :], diagonal)
        both[..., :rows, :] += after[..., :rows, :]
        parts = torch.cat([both, parts[:, even:]], 1)
    return parts[:, 0]


def split(inputs: Inputs) -> Plan:
    """The plan of a call whose sequences are segments: where they would be whole, of one."""
    plan = make_plan(inputs)
    if plan.per_segment:
        return plan
    if "split" not in plan.made:
        chunks = max(blocks(inputs.q.shape[1], plan.sizes["CT"]), 1)
        plan.made["split"] = dataclasses.replace(plan, per_segment=chunks, made={})
    return plan.made["split"]


@in_two
def forward(inputs: Inputs, save: bool, join: Any, ends: Any) -> Halves[Any]:
    """Outputs, final states, what is saved, and the true states at the start."""
    inputs, joint = passes.contiguous(inputs), Joint(join)
    compile_kernels(inputs, save)
    stages = forward_stages(inputs, save, joint)
    yield
    o, final, kept = stages()
    return o, final, kept if save else kept.new_empty(0), joint.start


@in_two
def forward_stages(
    inputs: Inputs, save: bool, joint: "Joint"
) -> Halves[tuple[Any, Tensor, Tensor]]:
    call = Call(inputs, split(inputs))
    call.values["join"] = joint
    kept = passes.keep(call, save)
    passes.scores(call)
    joint.begin(call)
    yield
    return *passes.scan(call, output=True), kept


def backward(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor, join: Any
) -> Callable[[], tuple[Tensor | None, ...]]:
    """Gradients by the eight tensors from q to initial_state, in two halves."""
    inputs = passes.contiguous(inputs)
    call, joint = Call(passes.in_pieces(inputs), split(inputs)), Joint(join, inputs.initial_state)
    return backward_stages(call, passes.piece(d_o), passes.piece(d_final), saved, joint)


@in_two
def backward_stages(
    call: Call, d_o: Tensor, d_final: Tensor, saved: Tensor, joint: "Joint"
) -> Halves[tuple[Tensor | None, ...]]:
    cut = passes.begin_back(call, d_o, d_final, saved, joint)
    joint.begin_back(call)
    yield
    return passes.gradients(call, cut)


def all_kernels(inputs: Inputs, save: bool) -> None:
    o, final, kept = forward_stages(inputs, save, Joint(None))()
    if save:
        like = torch.empty_like(o), torch.empty_like(final)
        backward_stages(Call(passes.in_pieces(inputs), split(inputs)), *like, kept, Joint(None))()


compile_kernels = passes.compiled_first(all_kernels)
