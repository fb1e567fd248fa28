"""The state from chunk to chunk, forwards with the outputs, and its gradient backwards.

A program keeps BV rows of one head's state S [V, K] in registers and goes through the chunks of a
sequence. What the rows of a chunk read, erase and write is scaled by decays: as four scalings of
rows, or (DECAYED: decay per channel, free erase) as decayed rows q', e', y' of q, k or a, k or b.

    none   w = v
    tied   F = v - S e'               E = F + N Diag(beta) F        w = beta E
    free   F = S a' + L v             w = F + N F, F rounded alike    and v along k'
    O = S q' + P w (+ P2 v)           S <- S Diag(chunk) + w y' (+ v k')

Backwards, with D the gradient by the state at a chunk's end, Y that by w and X that by F / beta:

    Y = P^T dO + D y'                 X = Y + N^T Diag(beta) Y
    D <- D Diag(chunk) + dO q' - beta X e' (free: + X a')
    dv = X, tied: beta X          free: dv = P2^T dO + D k' + L^T X

Everything is computed transposed, so that every product takes its left operand from registers.
Where scores are None, P_ij = read_i (q_i . k_j) write_j, without decays, is computed here, which
costs less than loading it.

SPLIT "starts" goes through one segment of a sequence, from the states that segments.py found for
the segments' starts (backwards: from the gradients at their ends). "ends" is the pass before: no
outputs, and segments start at zero, the first (backwards: the last) at the true state. Forwards,
programs beyond those of V take the rows of the identity through a segment and write nothing to
them, which gives the rows of A in S_end = S_start A + (S_end from zero). With OPEN all segments
start at zero: what is before the first (backwards: after the last) another process has.

A WINDOW of the chunks starts with the state (backwards: the gradient) that the one beside it ended
with; what it leaves of its chunks, it leaves in memory of its own.
"""

from collections import namedtuple
from collections.abc import Mapping
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.triton import plan, tiles
from deltarule.ops.delta_rule.triton.channel_tiles import value_gradients
from deltarule.ops.delta_rule.triton.fetched import backward_tiles, forward_tiles
from deltarule.ops.delta_rule.triton.plan import TENSOR_MEMORY, WHOLE, Call, Window
from deltarule.ops.delta_rule.triton.tile_sizes import architecture, configuration
from deltarule.ops.delta_rule.triton.tiles import SCALING
from deltarule.ops.runtime.places import place_of, stretch, window_bounds

# What the kernels over pairs of rows left of all chunks, and the scale of the scores. `readings`
# are the scalings again: of both the copy engine fetches other tiles.
Streams = namedtuple(
    "Streams", "scores value_scores corrections from_values scalings readings scale"
)


@triton.jit
def chunk_output(b_s, b_w, b_v, b_q, b_y, x, i_slot, o_i, o_r, S: tl.constexpr):
    """Rows of O from S and w, both rounded, and the tiles of q and v: [BV, BQ].

    Where the scores are taken here, w is scaled by what scales its writing, and b_y holds k.
    """
    if x.scores is None:
        b_p = raw_scores(b_y, b_q, o_r[:, None] <= o_i[None, :], S.PRECISION)
    else:
        b_p = tl.trans(tiles.load_slot(x.scores, i_slot, o_i, o_r, S.BQ, S.BT, S))
    b_o = tl.dot(b_s, tl.trans(b_q), input_precision=S.PRECISION)
    if x.scores is None:
        b_o = tl.dot(b_w, b_p, acc=b_o, input_precision=S.PRECISION)
    if S.SCALED:
        b_o *= tiles.load_scaling(x.readings, i_slot, SCALING.READ, o_i, S)
    elif not S.DECAYED:
        b_o *= x.scale
    if x.scores is not None:
        b_o = tl.dot(b_w, b_p, acc=b_o, input_precision=S.PRECISION)
    if S.ERASE == "free":
        b_p = tiles.load_slot(x.value_scores, i_slot, o_i, o_r, S.BQ, S.BT, S)
        b_o = tl.dot(tl.trans(b_v), tl.trans(b_p), acc=b_o, input_precision=S.PRECISION)
    return b_o


@triton.jit
def store_output(o, b_o, i_t, i_h, i_v, o_i, o_v, m_i, m_v, S: tl.constexpr):
    """Write rows of O, held transposed, to o [tokens, HV, V]; TMA_STORE: by the copy engine."""
    if S.TMA_STORE:
        o.store([i_t.to(tl.int32), i_h * S.V + i_v * S.BV], tl.trans(b_o))
    else:
        p_o = o + (i_t * S.HV + i_h) * S.V + o_i[None, :] * (S.HV * S.V) + o_v[:, None]
        tl.store(p_o, b_o, mask=m_i[None, :] & m_v)


@triton.jit
def written_gradients(b_d, b_do, b_y, b_p, x, i_slot, o_i, o_r, S: tl.constexpr):
    """dO as it meets q, scaled and rounded, [BV, BQ]; and Y [BV, BT], from D rounded."""
    b_z = tl.trans(b_do)
    if not S.DECAYED:
        b_read = x.scale
        if S.SCALED:
            b_read = tiles.load_scaling(x.readings, i_slot, SCALING.READ, o_i, S)
        b_z = (b_z.to(tl.float32) * b_read).to(b_do.dtype)
    b_x = tl.dot(b_d, tl.trans(b_y), input_precision=S.PRECISION)
    if x.scores is None:
        b_x = tl.dot(b_z, b_p, acc=b_x, input_precision=S.PRECISION)
    if S.SCALED:
        b_x *= tiles.load_scaling(x.scalings, i_slot, SCALING.WRITE, o_r, S)
    if x.scores is not None:
        b_x = tl.dot(tl.trans(b_do), b_p, acc=b_x, input_precision=S.PRECISION)
    return b_z, b_x


@triton.jit
def raw_scores(b_x, b_y, mask, PRECISION: tl.constexpr):
    """x_i . y_j where the mask is set, zeros elsewhere, rounded."""
    b_p = tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
    return tl.where(mask, b_p, 0.0).to(b_x.dtype)


@triton.jit
def prediction_errors(b_u, b_v, b_s, b_e, x, i_slot, o_r, S: tl.constexpr):
    """E (free: w) of a chunk from its values, transposed in b_u, and the rows b_e; and beta."""
    dtype = b_s.dtype
    b_n = tiles.load_slot(x.corrections, i_slot, o_r, o_r, S.BT, S.BT, S)
    b_f = tl.dot(b_s, tl.trans(b_e), input_precision=S.PRECISION)
    b_beta = 1.0
    if S.ERASE == "free":
        b_l = tiles.load_slot(x.from_values, i_slot, o_r, o_r, S.BT, S.BT, S)
        b_f = tl.dot(tl.trans(b_v), tl.trans(b_l), acc=b_f, input_precision=S.PRECISION)
        b_low, b_f = b_f.to(dtype), b_f.to(dtype).to(tl.float32)
    else:
        if S.SCALED:
            b_f *= tiles.load_scaling(x.scalings, i_slot, SCALING.ERASE, o_r, S)
        b_f = b_u - b_f
        b_beta = tiles.load_scaling(x.scalings, i_slot, SCALING.BETA, o_r, S)
        b_low = (b_f * b_beta).to(dtype)
    return tl.dot(b_low, tl.trans(b_n), acc=b_f, input_precision=S.PRECISION), b_beta


@triton.jit
def store_ends(ends, i_s, i_h, i_v, i_a, o_k, b_s, b_through, S: tl.constexpr):
    """Rows of S, a tile of A (i_a >= 0), or its diagonal, of ends [slots, HV, V + K or 1, K]."""
    ROWS: tl.constexpr = S.V + 1 if S.ERASE == "none" else S.V + S.K
    o_end = tl.where(i_a < 0, i_v * S.BV, S.V + i_a * S.BV) + tl.arange(0, S.BV)
    m_end, m_k = o_end < tl.where(i_a < 0, S.V, ROWS), (o_k < S.K)[None, :]
    p_end = tiles.state_tile(ends, i_s, i_h, o_end, o_k, S.HV, S.K, ROWS)
    tl.store(p_end, b_s, mask=m_end[:, None] & m_k)
    if S.ERASE == "none":
        p_end = tiles.state_tile(ends, i_s, i_h, S.V + tl.arange(0, 1), o_k, S.HV, S.K, ROWS)
        tl.store(p_end, b_through, mask=(o_k < tl.where(i_v == 0, S.K, 0))[None, :])


@triton.jit(do_not_specialize=["T", "N", "per_segment", "window", "per_window"])
def next_state_kernel(
    q, k, v, erase, write, cu_seqlens, scores, value_scores, corrections, from_values, scalings,
    readings, chunk_decay, initial_state, o, final_state, states, errors, scale, T, N,
    S: tl.constexpr, per_segment=1, window=None, per_window=None,
):  # fmt: skip
    """states [M, HV, V, K] and errors [M, HV, BT, V] hold S at the chunks' starts, and E (w).

    With DECAYED q, k (free erase), erase and write are [M, HV, rows, K], chunk_decay [M, HV, K].
    """
    x = Streams(scores, value_scores, corrections, from_values, scalings, readings, scale)
    OF_A: tl.constexpr = S.K if S.SPLIT == "ends" and S.ERASE != "none" else 0
    i_v, i_h, i_s = place_of((S.V + S.BV - 1) // S.BV + (OF_A + S.BV - 1) // S.BV, S.HV)
    i_n, start, length, i_m, place, last = stretch(i_s, cu_seqlens, T, N, per_segment, S)
    if S.SPLIT == "ends":
        # Tiles of A follow those of S; their values, which count as zero, are any that there are.
        i_a = i_v - tl.cdiv(S.V, S.BV)
        i_v = tl.where(i_a < 0, i_v, 0)
        if not S.OPEN:
            length = tl.where(last | ((i_a >= 0) & (place == 0)), 0, length)
    o_i, o_r, o_k = tl.arange(0, S.BQ), tl.arange(0, S.BT), tl.arange(0, S.BK)
    o_v = i_v * S.BV + tl.arange(0, S.BV)
    m_v = (o_v < S.V)[:, None]
    m_s = m_v & (o_k < S.K)[None, :]
    b_s = tiles.boundary_state(initial_state, i_s, i_n, i_h, o_v, o_k, place == 0, S)
    b_through = tl.full([1, S.BK], 1.0, tl.float32)
    if S.SPLIT == "ends" and S.ERASE != "none":
        b_s = tl.where(i_a * S.BV + tl.arange(0, S.BV)[:, None] == o_k[None, :], 1.0, b_s)
    i_key = i_h // (S.HV // S.H)
    low, high, number = window_bounds(i_s, i_m, tl.cdiv(length, S.CT), window, per_window, S)
    for i_c in tl.range(low, high, num_stages=S.STAGES):
        i_t = start + i_c * S.CT
        tokens = tl.minimum(length - i_c * S.CT, S.CT)
        m_i, m_r = o_i < tokens, o_r < tokens * S.N_STEPS
        i_slot, i_own = (i_m + i_c) * S.HV + i_h, (number + i_c) * S.HV + i_h
        b_y = tiles.load_keys(k, write, i_t * S.N_STEPS, i_slot, i_key, o_r, m_r, o_k, S.BT, S)
        b_v = tiles.load_tile(v, i_t * S.N_STEPS, i_h, i_v * S.BV, o_r, m_r, o_v, S.HV, S.V, S)
        dtype = b_v.dtype
        b_low = b_s.to(dtype)
        if S.SAVE:
            tl.store(tiles.state_tile(states, i_own, 0, o_v, o_k, 1, S.K, S.V), b_low, mask=m_s)
        if S.SPLIT == "ends" and S.ERASE == "free":
            b_v = tl.where(i_a < 0, b_v, 0.0)
        b_f = tl.trans(b_v).to(tl.float32)
        if S.SPLIT == "ends" and S.ERASE == "tied":
            b_f = tl.where(i_a < 0, b_f, 0.0)
        if S.ERASE != "none":
            b_e = b_y
            if S.DECAYED:
                b_e = tiles.load_slot(erase, i_slot, o_r, o_k, S.BT, S.K, S)
            b_f, b_beta = prediction_errors(b_f, b_v, b_low, b_e, x, i_slot, o_r, S)
            if S.SAVE:
                p_e = errors + (i_own * S.BT + o_r[None, :]) * S.V + o_v[:, None]
                tl.store(p_e, b_f.to(dtype), mask=m_v)
            if S.ERASE == "tied":
                b_f *= b_beta
        b_w = b_f.to(dtype)
        b_write = b_w
        if S.SCALED:
            b_write = (b_f * tiles.load_scaling(scalings, i_slot, SCALING.WRITE, o_r, S)).to(dtype)
        if S.OUTPUT:
            b_q = tiles.load_keys(q, q, i_t, i_slot, i_key, o_i, m_i, o_k, S.BQ, S)
            if scores is None:
                b_w = b_write
            b_o = chunk_output(b_low, b_w, b_v, b_q, b_y, x, i_slot, o_i, o_r, S)
            store_output(o, b_o.to(dtype), i_t, i_h, i_v, o_i, o_v, m_i, m_v, S)
        if S.DECAY != "none":
            b_decay = tiles.load_decay(chunk_decay, i_slot, o_k, S)
            b_s *= b_decay
            if S.SPLIT == "ends" and S.ERASE == "none":
                b_through *= b_decay
        b_s = tl.dot(b_write, b_y, acc=b_s, input_precision=S.PRECISION)
        if S.ERASE == "free":
            b_y = tiles.load_slot(k, i_slot, o_r, o_k, S.BT, S.K, S)
            b_s = tl.dot(tl.trans(b_v), b_y, acc=b_s, input_precision=S.PRECISION)
    if S.SPLIT == "ends":
        store_ends(final_state, i_s, i_h, i_v, i_a, o_k, b_s, b_through, S)
    else:
        # In any case that of a stretch's window, else that with which a sequence ends.
        if S.WINDOW != "none":
            i_n, last = i_s, True
        m_s = (o_v < tl.where(last, S.V, 0))[:, None] & (o_k < S.K)[None, :]
        p_s = tiles.state_tile(final_state, i_n, i_h, o_v, o_k, S.HV, S.K, S.V)
        tl.store(p_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=["T", "N", "per_segment", "window", "per_window"])
def next_state_backward_kernel(
    q, k, erase, write, cu_seqlens, scores, value_scores, corrections, from_values, scalings,
    readings, chunk_decay, d_o, d_final, d_initial, d_states, d_errors, d_values, d_v, d_q, d_k,
    scale, T, N, S: tl.constexpr, per_segment=1, window=None, per_window=None,
):  # fmt: skip
    """d_states [M, HV, V, K] and d_errors [M, HV, BT, V] hold D at the chunks' ends, and X.

    d_v takes the gradient by v (with a free erase d_values [M, HV, BT, V] does) or, without
    d_errors, X; D may go where BT rows of d_q and then of d_k will. Nothing is stored without room.
    """
    x = Streams(scores, value_scores, corrections, from_values, scalings, readings, scale)
    i_v, i_h, i_s = place_of((S.V + S.BV - 1) // S.BV, S.HV)
    i_n, start, length, i_m, place, last = stretch(i_s, cu_seqlens, T, N, per_segment, S)
    if S.SPLIT == "ends" and not S.OPEN:
        length = tl.where(place == 0, 0, length)
    o_i, o_r, o_k = tl.arange(0, S.BQ), tl.arange(0, S.BT), tl.arange(0, S.BK)
    o_v = i_v * S.BV + tl.arange(0, S.BV)
    m_v = (o_v < S.V)[:, None]
    m_s = m_v & (o_k < S.K)[None, :]
    b_d = tiles.boundary_state(d_final, i_s, i_n, i_h, o_v, o_k, last, S)
    i_key = i_h // (S.HV // S.H)
    low, high, number = window_bounds(i_s, i_m, tl.cdiv(length, S.CT), window, per_window, S)
    for i_back in tl.range(0, high - low, num_stages=S.STAGES):
        i_c = high - 1 - i_back
        i_t = start + i_c * S.CT
        tokens = tl.minimum(length - i_c * S.CT, S.CT)
        m_i, m_r = o_i < tokens, o_r < tokens * S.N_STEPS
        i_slot, i_own = ((i_m + i_c) * S.HV + i_h) // S.PER_GATE, (number + i_c) * S.HV + i_h
        p_x = (i_own * S.BT + o_r[None, :]) * S.V + o_v[:, None]
        b_q = tiles.load_keys(q, q, i_t, i_slot, i_key, o_i, m_i, o_k, S.BQ, S)
        b_y = tiles.load_keys(k, write, i_t * S.N_STEPS, i_slot, i_key, o_r, m_r, o_k, S.BT, S)
        b_do = tiles.load_tile(d_o, i_t, i_h, i_v * S.BV, o_i, m_i, o_v, S.HV, S.V, S)
        if scores is None:
            b_p = raw_scores(b_q, b_y, o_i[:, None] >= o_r[None, :], S.PRECISION)
        else:
            b_p = tiles.load_slot(scores, i_slot, o_i, o_r, S.BQ, S.BT, S)
        dtype = b_do.dtype
        b_low = b_d.to(dtype)
        if d_states is not None:
            tl.store(tiles.state_tile(d_states, i_own, 0, o_v, o_k, 1, S.K, S.V), b_low, mask=m_s)
        if d_q is not None:
            p_d = ((i_t + o_v % S.BT) * S.H + i_key)[:, None] * S.K + o_k[None, :]
            tl.store(tl.where((o_v < S.BT)[:, None], d_q + p_d, d_k + p_d), b_low, mask=m_s)
        b_z, b_x = written_gradients(b_low, b_do, b_y, b_p, x, i_slot, o_i, o_r, S)
        if S.ERASE != "none":
            b_n = tiles.load_slot(corrections, i_slot, o_r, o_r, S.BT, S.BT, S)
            b_e = b_y
            if S.DECAYED:
                b_e = tiles.load_slot(erase, i_slot, o_r, o_k, S.BT, S.K, S)
            b_low_x = b_x.to(dtype)
            if S.ERASE == "tied":
                b_beta = tiles.load_scaling(scalings, i_slot, SCALING.BETA, o_r, S)
                b_low_x = (b_x * b_beta).to(dtype)
            b_x = tl.dot(b_low_x, b_n, acc=b_x, input_precision=S.PRECISION)
        if d_errors is not None:
            tl.store(d_errors + p_x, b_x.to(dtype), mask=m_v)
        b_lent = b_x
        if S.ERASE == "tied":
            b_x *= b_beta
        if d_v is not None:
            row, b_dv = i_t * S.N_STEPS, (b_lent if d_errors is None else b_x).to(dtype)
            store_output(d_v, b_dv, row, i_h, i_v, o_r, o_v, m_r, m_v, S)
        if d_values is not None:
            b_k = tiles.load_slot(k, i_slot, o_r, o_k, S.BT, S.K, S)
            b_dv = value_gradients(b_low, b_do, b_x.to(dtype), b_k, x, i_slot, o_i, o_r, S)
            tl.store(d_values + p_x, b_dv.to(dtype), mask=m_v)
        if S.DECAY != "none":
            b_d *= tiles.load_decay(chunk_decay, i_slot, o_k, S)
        b_d = tl.dot(b_z, b_q, acc=b_d, input_precision=S.PRECISION)
        if S.ERASE == "tied":
            b_x = -b_x
            if S.SCALED:
                b_x *= tiles.load_scaling(scalings, i_slot, SCALING.ERASE, o_r, S)
        if S.ERASE != "none":
            b_d = tl.dot(b_x.to(dtype), b_e, acc=b_d, input_precision=S.PRECISION)
    if S.SPLIT == "ends":
        i_n, place = i_s, 0
    if S.WINDOW != "none":
        # Before the first of its chunks a stretch is not at its start.
        i_n, place = tl.where(window > 0, i_s, i_n), tl.where(window > 0, 0, place)
    m_s = (o_v < tl.where(place == 0, S.V, 0))[:, None] & (o_k < S.K)[None, :]
    tl.store(tiles.state_tile(d_initial, i_n, i_h, o_v, o_k, S.HV, S.K, S.V), b_d, mask=m_s)


Buffers = Mapping[str, Tensor | None]
# What scans may leave.
LEFT = "o", "states", "errors", "d_states", "d_errors", "d_values", "d_v", "d_q", "d_k"


def scan_config(call: Call, name: str, ends: bool) -> dict[str, Any]:
    config = configuration(name, call.plan.tile_key)
    if ends and config["BV"] >= 128:
        # Without outputs tiles half as large need so little that several programs share a
        # multiprocessor, and one computes while another waits; that takes the place of a stage.
        halves = {name: config[name] // 2 for name in ("BV", "num_warps")}
        config = config | halves | {"STAGES": max(config["STAGES"] - 1, 1)}
    full = plan.full_tiles(call.inputs, call.plan, config["BV"])
    # Where products end in tensor memory, Triton cannot hold a store of the copy engine back.
    stores = full and architecture(call.inputs.q.device) < TENSOR_MEMORY
    own = {"TMA": full, "TMA_STORE": stores, "num_stages": config["STAGES"]}
    return config | own | {"SPLIT": "ends" if ends else call.plan.split}


# Their kernels, with the names of these in the tables, and what the copy engine fetches for them.
THROUGH = next_state_kernel, "next_state", forward_tiles
BACK = next_state_backward_kernel, "next_state_backward", backward_tiles


def launch_scan(
    back: bool, call: Call, own: Buffers, window: Window = WHOLE, ends: bool = False
) -> None:
    """Launch a scan with tensors of its `own`, or that of wide keys: not of windows, nor of `ends`.

    It goes from initial_state to final_state or from d_final back to d_initial; what it may leave
    goes where `own` has room. With `ends` segments start at zero.
    """
    (kernel, name, fetched), own = BACK if back else THROUGH, {**dict.fromkeys(LEFT), **own}
    if window is WHOLE and not ends and not call["again"] and plan.on_hopper(call.inputs.q):
        from deltarule.ops.delta_rule.gluon import wide_scan_stage

        if wide_scan_stage.scans(call, own, back=back):
            return
    config, sizes = call.once(scan_config, name, ends), call.plan.sizes
    programs = plan.blocks(sizes["V"], config["BV"])
    if ends and not back and call.inputs.erase != "none":
        programs += plan.blocks(sizes["K"], config["BV"])
    decayed = {"q": call["decayed_q"], "k": call["decayed_k"]} if call.inputs.by_channel else {}
    given = {"readings": call["scalings"], "OPEN": ends and call["join"] is not None}
    given |= {"OUTPUT": own["o"] is not None, "SAVE": own["states"] is not None}
    grid = programs * sizes["HV"] * plan.stretches(call.inputs, call.plan), 1, 1
    call.launch(kernel, grid, config | window.constants() | decayed | given | own, fetched)


scan_through, scan_back = partial(launch_scan, False), partial(launch_scan, True)
