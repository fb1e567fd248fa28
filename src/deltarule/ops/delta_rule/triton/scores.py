"""Scores of the pairs of rows of a chunk, all chunks at once; decay none or one per head.

    P_ij = scale * decay(j, i] q_i . k_j        for the rows j up to token i's last
    M_ij = decay(j, i] k_i . k_j                for the rows j before i, and of M the correction N

from the sums of decays that `head_sums_kernel` left; and, so that the kernels that follow the
chunks need neither gates nor norms, the scalings of rows

    read_i = scale decay[0, i] / |q_i|      erase_i = decay[0, i] / |k_i|
    write_j = decay(j, end] / |k_j|

(1 / |x| with `normalize_qk` only), beta, and the decay of the whole chunk. P is left out (scores
None) where the kernels that follow take it. A program takes one chunk of one value head; that it
takes the products of its key head again costs less than keeping them for the next.
"""

import torch
import triton
import triton.language as tl

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import plan, tiles
from deltarule.ops.delta_rule.triton.fetched import score_tiles
from deltarule.ops.delta_rule.triton.plan import Call, Plan, Shapes
from deltarule.ops.delta_rule.triton.tile_sizes import configuration
from deltarule.ops.delta_rule.triton.tiles import LOG2_E, LOWEST, SCALING, SCALINGS
from deltarule.ops.runtime.places import chunk_place

# What scans may take scores of: they round q . k before it is scaled, for which float16 has no
# range. With more key channels a tile of S has fewer values, and each would take them again.
SCORED_TYPES, SCORED_KEYS = (torch.bfloat16,), 128
# Heads whose decays a program adds up.
SUM_HEADS = 16


@triton.jit(do_not_specialize=["T", "N"])
def head_sums_kernel(
    log_decay, cu_seqlens, scalings, T, N, s_decay_b, s_decay_t, s_decay_h, S: tl.constexpr
):
    """Two rows of scalings [M, HV, SCALINGS, BT], of one chunk and BH heads.

    The first row of each token decays.
    """
    i_m, o_h = tl.program_id(0), tl.program_id(1) * S.BH + tl.arange(0, S.BH)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    if tokens <= 0:
        return
    o_r = tl.arange(0, S.BT)
    m_r = (o_r < tl.minimum(tokens, S.CT) * S.N_STEPS) & (o_r % S.N_STEPS == 0)
    m_h = (o_h < S.HV)[None, :]
    p_g = log_decay + (first // T) * s_decay_b + (first % T + o_r // S.N_STEPS)[:, None] * s_decay_t
    b_g = tl.load(p_g + o_h[None, :] * s_decay_h, mask=m_r[:, None] & m_h, other=0.0)
    b_g = tl.maximum(b_g.to(tl.float32) * LOG2_E, LOWEST)
    whole = tl.floor(b_g + 0.5)
    whole, rest = tl.cumsum(whole, axis=0), tl.cumsum(b_g - whole, axis=0)
    p_s = scalings + (i_m.to(tl.int64) * S.HV + o_h)[None, :] * SCALINGS * S.BT + o_r[:, None]
    tl.store(p_s + SCALING.WHOLE * S.BT, whole, mask=m_h)
    tl.store(p_s + SCALING.REST * S.BT, rest, mask=m_h)


@triton.jit(do_not_specialize=["T", "N"])
def pair_scores_kernel(
    q, k, beta, cu_seqlens, scores, corrections, scalings, chunk_decay, scale, T, N, s_beta_b,
    s_beta_t, s_beta_h, S: tl.constexpr,
):  # fmt: skip
    """scores [M, HV, BQ, BT], corrections [M, HV, BT, BT], scalings [M, HV, SCALINGS, BT]."""
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    i_key = i_h // (S.HV // S.H)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    if tokens <= 0:
        return
    tokens = tl.minimum(tokens, S.CT)
    o_i, o_r, o_k = tl.arange(0, S.BQ), tl.arange(0, S.BT), tl.arange(0, S.BK)
    m_i, m_r = o_i < tokens, o_r < tokens * S.N_STEPS
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    p_s = scalings
    if S.TIED or S.HAS_DECAY or S.UNIT_NORM:
        p_s += i_slot * SCALINGS * S.BT
    # Fetched before the tiles, so that the program waits for both at once; those of several steps
    # would take more registers than there are.
    if S.HAS_DECAY and S.N_STEPS == 1:
        whole, rest, whole_q, rest_q = tiles.load_chunk_sums(p_s, o_r, o_i, S.N_STEPS, S.BT)
    b_k = tiles.load_tile(k, first * S.N_STEPS, i_key, 0, o_r, m_r, o_k, S.H, S.K, S)
    if scores is not None or S.UNIT_NORM:
        b_q = tiles.load_tile(q, first, i_key, 0, o_i, m_i, o_k, S.H, S.K, S)
    b_read = tl.where(m_i, scale, 0.0)
    b_key = tl.where(m_r, 1.0, 0.0)
    if S.UNIT_NORM:
        b_read *= tiles.inverse_norm(b_q)
        b_key *= tiles.inverse_norm(b_k)
    if scores is not None:
        b_p = tl.dot(b_q, tl.trans(b_k), input_precision=S.PRECISION)
        if S.UNIT_NORM:
            b_p *= b_read[:, None] * b_key[None, :]
        else:
            b_p *= scale
        if S.HAS_DECAY:
            if S.N_STEPS > 1:
                whole, rest, whole_q, rest_q = tiles.load_chunk_sums(p_s, o_r, o_i, S.N_STEPS, S.BT)
            b_p *= tiles.pair_decays(whole_q, rest_q, whole, rest)
        b_p = tl.where(o_r[None, :] // S.N_STEPS <= o_i[:, None], b_p, 0.0)
        p_p = scores + i_slot * S.BQ * S.BT + o_i[:, None] * S.BT + o_r[None, :]
        tl.store(p_p, b_p.to(scores.dtype.element_ty))
    if S.TIED:
        p_beta = beta + (first // T) * s_beta_b + i_h * s_beta_h
        p_beta += (first % T * S.N_STEPS + o_r) * s_beta_t
        b_beta = tl.load(p_beta, mask=m_r, other=0.0).to(tl.float32)
        tl.store(p_s + SCALING.BETA * S.BT + o_r, b_beta)
        b_m = -tl.dot(b_k, tl.trans(b_k), input_precision=S.PRECISION)
        if S.UNIT_NORM:
            b_m *= b_key[:, None] * b_key[None, :]
        if S.HAS_DECAY:
            b_m *= tiles.pair_decays(whole, rest, whole, rest)
        b_m = tl.where(o_r[:, None] > o_r[None, :], b_m, 0.0)
        b_n = tiles.correction(b_m, b_beta, S.BT, S.PRECISION)
        p_n = corrections + i_slot * S.BT * S.BT + o_r[:, None] * S.BT + o_r[None, :]
        tl.store(p_n, b_n.to(corrections.dtype.element_ty))
    if S.HAS_DECAY:
        whole_end, rest_end = tiles.load_decay_sums(p_s, S.BT - 1, S.BT)
        tl.store(chunk_decay + i_slot, tl.exp2(whole_end + rest_end))
        b_read *= tl.exp2(whole_q + rest_q)
        b_write = b_key * tiles.decay_ratio(whole_end, rest_end, whole, rest)
        b_key *= tl.exp2(whole + rest)
        tl.store(p_s + SCALING.WRITE * S.BT + o_r, b_write)
    elif S.UNIT_NORM:
        tl.store(p_s + SCALING.WRITE * S.BT + o_r, b_key)
    if S.HAS_DECAY or S.UNIT_NORM:
        tl.store(p_s + SCALING.READ * S.BT + o_i, b_read)
        tl.store(p_s + SCALING.ERASE * S.BT + o_r, b_key)


def score_shapes(inputs: Inputs, planned: Plan) -> Shapes:
    sizes, dtype = planned.sizes, inputs.q.dtype
    chunks, rows = (planned.chunks, sizes["HV"] // inputs.per_gate), sizes["BT"]
    tied, scaled = inputs.beta is not None, inputs.log_decay is not None or inputs.normalize_qk
    shapes: Shapes = {}
    if not ("makes_pairs" in planned.made or scans_score(inputs, planned)):
        shapes["scores"] = (*chunks, sizes["BQ"], rows), dtype
    if tied:
        shapes["corrections"] = (*chunks, rows, rows), dtype
    if tied or scaled:
        shapes["scalings"] = (*chunks, SCALINGS.value, rows), torch.float32
    if inputs.log_decay is not None:
        shapes["chunk_decay"] = chunks, torch.float32
    return shapes


def scans_score(inputs: Inputs, planned: Plan) -> bool:
    """Whether the scans take q . k themselves: without decays, where one tile of S has all values.

    Elsewhere than on Hopper there are too few registers, or too little tensor memory, for it.
    """
    x, tile = inputs.v, configuration("next_state", planned.tile_key)["BV"]
    small = inputs.q.shape[-1] <= SCORED_KEYS and x.shape[-1] <= tile and inputs.n_steps == 1
    able = x.dtype in SCORED_TYPES and plan.on_hopper(x)
    return inputs.log_decay is None and small and able


def head_scores(call: Call) -> None:
    """Scores, corrections, scalings and the decays of chunks, into the buffers there are."""
    chunks, heads = call.plan.chunks, call.plan.sizes["HV"]
    if call.inputs.log_decay is not None:
        grid = chunks, plan.blocks(heads, SUM_HEADS), 1
        call.launch(head_sums_kernel, grid, {"BH": SUM_HEADS, "num_warps": 2, "num_stages": 1})
    if call["scores"] is not None or call["scalings"] is not None:
        config = call.once(pair_scores_config)
        call.launch(pair_scores_kernel, (chunks, heads, 1), config, score_tiles)


def pair_scores_config(call: Call) -> dict[str, object]:
    precision = plan.precision(call.inputs.q.dtype, inverse=True)
    own = {"PRECISION": precision, "TMA": plan.full_tiles(call.inputs, call.plan, 1)}
    return {**configuration("pair_scores", call.plan.tile_key), **own}
