"""A forward and a backward in Triton that meet other processes half way.

Sequences are split into segments, as those that are few and long are anyway. All segments go from a
zero state to their ends, which with their transitions give U and M of the tokens here; from what
comes of the exchange, the states at the starts of the segments follow, and the main pass. Nothing
is computed twice.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.context.exchange import applied
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.passes import (
    backward_stages,
    compile_first,
    contiguous,
    kept_layout,
    piece,
    scan,
    scores,
)
from deltarule.ops.delta_rule.triton.plan import Call, Plan, blocks, make_plan, views


class Joint:
    """Where the segments of one call meet the other processes: forwards, or backwards.

    Args:
        join: Does the meeting; see `deltarule.ops.delta_rule.spanning.Join`.
        start: The true states at the start of all sequences, once they are known.
    """

    def __init__(self, join: Any, start: Tensor | None = None) -> None:
        """Nobody has met yet."""
        self.join, self.start = join, start

    def states(self, call: Call, ends: Tensor) -> Tensor:
        """The true states at the start of all sequences, from the segments' ends."""
        if self.start is None:
            inputs, rows = call.inputs, self.join.rows
            _, heads, value_size, key_size = inputs.state_shape
            if inputs.initial_state is None:
                state = ends.new_zeros(rows, heads, value_size, key_size)
            else:
                state = inputs.initial_state[-rows:]
            through = torch.ones if self.join.diagonal else torch.eye
            size = (1, key_size) if self.join.diagonal else (key_size,)
            carried = through(*size, device=ends.device).expand(rows, heads, -1, -1)
            both = torch.cat([state, carried], -2)
            for part in self.segments(call, ends, -1).unbind(1):
                both = applied(both, part[..., value_size:, :], self.join.diagonal)
                both[..., :value_size, :] += part[..., :value_size, :]
            end, transition = both[..., :value_size, :], both[..., value_size:, :]
            self.start = self.join.started(inputs, end, transition)
        return self.start

    def gradients(self, call: Call, d_ends: Tensor) -> Tensor:
        """The gradients by the states at the end of all sequences, from those by its segments."""
        value_size = call.inputs.v.shape[3]
        d_state = call["d_final"][: self.join.rows]
        ends = self.segments(call, call["ends"], 0)
        transitions = ends[..., value_size:, :]
        back = transitions if self.join.diagonal else transitions.mT
        d_parts = self.segments(call, d_ends, 0)
        for number in reversed(range(d_parts.shape[1])):
            d_state = applied(d_state, back[:, number], self.join.diagonal) + d_parts[:, number]
        return self.join.ended(call["d_final"], d_state)

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


def split(inputs: Inputs) -> Plan:
    """The plan of a call whose sequences are segments: where they would be whole, of one."""
    plan = make_plan(inputs)
    if plan.per_segment:
        return plan
    if "split" not in plan.made:
        chunks = max(blocks(inputs.q.shape[1], plan.sizes["CT"]), 1)
        plan.made["split"] = dataclasses.replace(plan, per_segment=chunks, made={})
    split: Plan = plan.made["split"]
    return split


def forward(
    inputs: Inputs, save: bool, join: Any, ends: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states, what is saved, and the true states at the start."""
    inputs, joint = contiguous(inputs), Joint(join)
    plan = split(inputs)
    compile_first(inputs, plan, (forward, save), lambda: compiled(inputs, plan, save))
    o, final, kept = forward_stages(inputs, plan, save, joint)
    assert joint.start is not None
    return o, final, kept if save else kept.new_empty(0), joint.start


def forward_stages(
    inputs: Inputs, plan: Plan, save: bool, joint: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels of the forward, with a meeting half way."""
    call = Call(inputs, plan)
    call.values["join"] = joint
    places = call.once(kept_layout, save)
    kept = call.empty((places.elements,))
    call.values |= views(kept, places)
    scores(call)
    o, final = scan(call, output=True)
    assert o is not None
    return o, final, kept


class Nobody:
    """Stands for the meeting while kernels are only compiled."""

    def states(self, call: Call, ends: Tensor) -> Tensor:
        """Any."""
        return call.empty(call.inputs.state_shape)

    def gradients(self, call: Call, d_ends: Tensor) -> Tensor:
        """Any."""
        gradients: Tensor = call["d_final"]
        return gradients


def compiled(inputs: Inputs, plan: Plan, save: bool) -> None:
    """Launch what the forward and, where it saves for one, the backward launch."""
    o, final, kept = forward_stages(inputs, plan, save, Nobody())
    if save:
        like = torch.empty_like(o), torch.empty_like(final)
        backward_stages(*like, inputs, plan, kept, join=Nobody())


def backward(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor, join: Any
) -> tuple[Tensor | None, ...]:
    """Gradients by the eight tensors from q to initial_state."""
    inputs = contiguous(inputs)
    joint = Joint(join, inputs.initial_state)
    found = list(
        backward_stages(piece(d_o), piece(d_final), inputs, split(inputs), saved, join=joint)
    )
    if inputs.beta is not None and (d_beta := found[3]) is not None:
        found[3] = d_beta.to(inputs.beta.dtype)
    return tuple(found)
