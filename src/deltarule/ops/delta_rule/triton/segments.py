"""The states at the starts of the segments that a long sequence is split into.

scan.py takes every segment from a zero state to its end, the first from the true state, and
gives the transitions A of the segments:

    S_start of the next = S_start A + (S_end from zero)

Backwards D_end of the segment before = D_end A^T + (D_start from zero), from the last segment on.
A program keeps BV rows of one head's state and goes through the segments of a sequence.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.triton.plan import Call, blocks, on_hopper
from deltarule.ops.delta_rule.triton.scan import scan_back, scan_through
from deltarule.ops.delta_rule.triton.tiles import state_tile
from deltarule.ops.runtime.launch import multiprocessors
from deltarule.ops.runtime.places import first_chunk, place_of, sequence_bounds

# The transitions of two segments, in float32, fit beside each other on every architecture.
CONFIG = {"BV": 16, "num_warps": 8, "num_stages": 2}


@triton.jit(do_not_specialize=["T", "per_segment"])
def segment_starts_kernel(
    boundary, ends, transitions, starts, cu_seqlens, T, per_segment, S: tl.constexpr
):
    """starts [slots, HV, V, K] from boundary [N, HV, V, K] and ends [slots, HV, ROWS, K].

    REVERSED ends have V rows. The transitions are rows V to ROWS of a tensor [slots, HV, ROWS, K].
    """
    i_v, i_h, i_n = place_of((S.V + S.BV - 1) // S.BV, S.HV)
    start, length = sequence_bounds(cu_seqlens, i_n, T, S.PACKED)
    size = per_segment * S.CT
    i_s = first_chunk(start, i_n, T, size, S.PACKED)
    count = tl.maximum(tl.cdiv(length, size), 1)
    step = 1
    END_ROWS: tl.constexpr = S.V if S.REVERSED else S.ROWS
    if S.REVERSED:
        i_s += count - 1
        step = -1
    o_k, o_v = tl.arange(0, S.BK), i_v * S.BV + tl.arange(0, S.BV)
    m_k, m_s = o_k < S.K, (o_v < S.V)[:, None] & (o_k < S.K)[None, :]
    b_s = tl.zeros([S.BV, S.BK], tl.float32)
    if boundary is not None:
        b_s = tl.load(state_tile(boundary, i_n, i_h, o_v, o_k, S.HV, S.K, S.V), mask=m_s, other=0.0)
    tl.store(state_tile(starts, i_s, i_h, o_v, o_k, S.HV, S.K, S.V), b_s, mask=m_s)
    if not S.OPEN:
        m_more = m_s & (o_v < tl.where(count > 1, S.V, 0))[:, None]
        # The first one's end comes from the true state.
        p_end = state_tile(ends, i_s, i_h, o_v, o_k, S.HV, S.K, END_ROWS)
        b_s = tl.load(p_end, mask=m_more, other=0.0)
        p_s = state_tile(starts, i_s + step, i_h, o_v, o_k, S.HV, S.K, S.V)
        tl.store(p_s, b_s, mask=m_more)
    for i in range(0 if S.OPEN else 1, count - 1):
        i_from = i_s + i * step
        p_end = state_tile(ends, i_from, i_h, o_v, o_k, S.HV, S.K, END_ROWS)
        b_end = tl.load(p_end, mask=m_s, other=0.0)
        if S.DIAGONAL:
            p_a = state_tile(
                transitions, i_from, i_h, S.V + tl.arange(0, 1), o_k, S.HV, S.K, S.ROWS
            )
            b_s = b_s * tl.load(p_a, mask=m_k[None, :], other=0.0) + b_end
        else:
            p_a = state_tile(transitions, i_from, i_h, S.V + o_k, o_k, S.HV, S.K, S.ROWS)
            b_a = tl.load(p_a, mask=m_k[:, None] & m_k[None, :], other=0.0)
            if S.REVERSED:
                b_a = tl.trans(b_a)
            b_s = tl.dot(b_s, b_a, acc=b_end, input_precision="tf32x3")
        p_s = state_tile(starts, i_from + step, i_h, o_v, o_k, S.HV, S.K, S.V)
        tl.store(p_s, b_s, mask=m_s)


def segment_starts(call: Call, boundary: Tensor | None, ends: Tensor, backwards: bool) -> Tensor:
    """The states at the segments' starts (backwards: the gradients at their ends).

    `boundary` is the initial state, or the gradient by the final one; `ends` and the transitions
    are what the kernels of scan.py leave with SPLIT "ends".
    """
    sequences, heads, value_size, key_size = call.inputs.state_shape
    transitions = call["ends"]
    starts = call.empty((ends.shape[0], heads, value_size, key_size))
    rows, one_tile = CONFIG["BV"], heads * sequences
    # Each program reads all transitions: tiles of twice the rows where those make a second round.
    if on_hopper(ends) and blocks(value_size, rows) * one_tile > multiprocessors(ends.device):
        rows *= 2
    grid = blocks(value_size, rows) * one_tile, 1, 1
    given = {"boundary": boundary, "ends": ends, "transitions": transitions, "starts": starts}
    kind = {"DIAGONAL": call.inputs.erase == "none", "REVERSED": backwards}
    kind |= {"ROWS": transitions.shape[2], "OPEN": call["join"] is not None}
    call.launch(segment_starts_kernel, grid, {**CONFIG, **given, **kind, "BV": rows})
    return starts


def with_roles(call: Call) -> Any:
    """The module of the scans as kernels with roles, on the GPUs that they are for; else None."""
    if not on_hopper(call.inputs.q):
        return None
    from deltarule.ops.delta_rule.gluon import segment_scan_stage

    return segment_scan_stage


def segment_scan(call: Call, goal: str) -> Any:
    """The same, where this scan of the call takes it."""
    stage = with_roles(call)
    return stage if stage and stage.takes(call, goal) else None


def alone(call: Call) -> Call:
    """A call that keeps nothing, as the scans with roles take it where they do."""
    stage = with_roles(call)
    return stage.alone(call) if stage else call


def leave_ends(call: Call) -> None:
    """What the segments leave, with their transitions."""
    initial = None if call["join"] else call.inputs.initial_state
    if fused := segment_scan(call, "ends"):
        fused.leave_ends(call, initial)
        return
    scan_through(call, {"initial_state": initial, "final_state": call["ends"]}, ends=True)


def first_states(call: Call) -> Tensor:
    """The states at the segments' starts; `ends` takes the segments' transitions besides."""
    join = call["join"]
    # Where the start is still to come, the ends have gone to meet it.
    if not join or join.start is not None:
        leave_ends(call)
    initial = join.states(call) if join else call.inputs.initial_state
    if call["halves"] is not None and (fused := segment_scan(call, "ends")):
        return fused.starts(call, initial)
    return segment_starts(call, initial, call["ends"], False)


def leave_ends_back(call: Call) -> Tensor:
    d_ends = call.empty((len(call["ends"]), *call.inputs.state_shape[1:]))
    d_final = None if call["join"] else call["d_final"]
    if fused := segment_scan(call, "back"):
        fused.run(call, "back", d_final, d_ends)
    else:
        scan_back(call, {"d_final": d_final, "d_initial": d_ends}, ends=True)
    return d_ends


def last_gradients(call: Call) -> Tensor:
    if join := call["join"]:
        return segment_starts(call, join.gradients(call), join.d_ends, True)
    return segment_starts(call, call["d_final"], leave_ends_back(call), True)
