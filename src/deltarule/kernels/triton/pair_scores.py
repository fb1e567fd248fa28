"""What the rows of a chunk are to each other, all chunks at once; decay none or one per head.

    P_ij = scale * decay(j, i] q_i . k_j        for the rows j up to token i's last
    M_ij = decay(j, i] k_i . k_j                for the rows j before i, and of M the correction N

and, so that the kernels which follow the chunks need neither gates nor norms, the scalings of rows

    read_i = scale decay[0, i] / |q_i|      erase_i = decay[0, i] / |k_i|
    write_j = decay(j, end] / |k_j|

(1 / |x| with `normalize_qk` only), beta, and the decay of the whole chunk. A program takes one
chunk of one value head; that it takes the products of its key head again costs less than keeping
them for the next.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.chunk import chunk_place
from deltarule.kernels.triton.corrected_values import correction
from deltarule.kernels.triton.decay import chunk_decay_sums, decay_ratio
from deltarule.kernels.triton.tiles import load_tile
from deltarule.kernels.triton.unit_norm import inverse_norm


@triton.jit(do_not_specialize=["T", "N"])
def pair_scores_kernel(
    q, k, beta, log_decay, cu_seqlens, scores, corrections, scalings, chunk_decay,
    scale, T, N, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_DECAY: tl.constexpr, TIED: tl.constexpr, UNIT_NORM: tl.constexpr, PACKED: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores [M, HV, BQ, BT], corrections [M, HV, BT, BT], scalings [M, HV, 4, BT]."""
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    i_key = i_h // (HV // H)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
    if tokens <= 0:
        return
    tokens = tl.minimum(tokens, CT)
    i_b, i_t = first // T, first % T
    o_i, o_r, o_k = tl.arange(0, BQ), tl.arange(0, BT), tl.arange(0, BK)
    m_i, m_r = o_i < tokens, o_r < tokens * N_STEPS
    i_slot = i_m.to(tl.int64) * HV + i_h
    if TIED:
        p_beta = beta + i_b * s_beta_b + i_t * N_STEPS * s_beta_t + i_h * s_beta_h
        b_beta = tl.load(p_beta + o_r * s_beta_t, mask=m_r, other=0.0).to(tl.float32)
    whole, rest = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    whole_q, rest_q = tl.zeros([BQ], tl.float32), tl.zeros([BQ], tl.float32)
    if HAS_DECAY:
        log_decay += i_b * s_decay_b + i_t * s_decay_t + i_h * s_decay_h
        whole, rest, whole_q, rest_q = chunk_decay_sums(
            log_decay, o_r, o_i, tokens, s_decay_t, N_STEPS
        )
    b_k = load_tile(k, first * N_STEPS, i_key, 0, o_r, m_r, o_k, H, K, K == BK, TMA)
    b_q = load_tile(q, first, i_key, 0, o_i, m_i, o_k, H, K, K == BK, TMA)
    b_read = tl.where(m_i, scale, 0.0)
    b_key = tl.where(m_r, 1.0, 0.0)
    if UNIT_NORM:
        b_read *= inverse_norm(b_q)
        b_key *= inverse_norm(b_k)
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if UNIT_NORM:
        b_p *= b_read[:, None] * b_key[None, :]
    else:
        b_p *= scale
    p_s = scalings
    if TIED or HAS_DECAY or UNIT_NORM:
        p_s += i_slot * 4 * BT
    if HAS_DECAY or UNIT_NORM:
        end = o_r == BT - 1
        whole_end, rest_end = tl.sum(tl.where(end, whole, 0.0)), tl.sum(tl.where(end, rest, 0.0))
        tl.store(p_s + o_i, b_read * tl.exp2(whole_q + rest_q))
        tl.store(p_s + BT + o_r, b_key * tl.exp2(whole + rest))
        b_end = decay_ratio(whole_end, rest_end, whole, rest)
        tl.store(p_s + 2 * BT + o_r, b_key * b_end)
        tl.store(chunk_decay + i_slot, tl.exp2(whole_end + rest_end))
    if HAS_DECAY:
        b_p *= decay_ratio(whole_q[:, None], rest_q[:, None], whole[None, :], rest[None, :])
    b_p = tl.where(o_r[None, :] // N_STEPS <= o_i[:, None], b_p, 0.0)
    p_p = scores + i_slot * BQ * BT + o_i[:, None] * BT + o_r[None, :]
    tl.store(p_p, b_p.to(scores.dtype.element_ty))
    if TIED:
        tl.store(p_s + 3 * BT + o_r, b_beta)
        b_m = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
        if UNIT_NORM:
            b_m *= b_key[:, None] * b_key[None, :]
        if HAS_DECAY:
            b_m *= -decay_ratio(whole[:, None], rest[:, None], whole[None, :], rest[None, :])
        else:
            b_m = -b_m
        b_m = tl.where(o_r[:, None] > o_r[None, :], b_m, 0.0)
        b_n = correction(b_m, b_beta, BT, PRECISION)
        p_n = corrections + i_slot * BT * BT + o_r[:, None] * BT + o_r[None, :]
        tl.store(p_n, b_n.to(corrections.dtype.element_ty))
