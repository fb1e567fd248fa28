"""The gradients by the scores of every pair of rows in a chunk, before any decay.

    none    scale dO_i . v_j                            for the rows j up to row i
    tied    scale dO_i . w_j and, of rows before i, -beta_i X_i . w_j              w_j = beta_j E_j
    free    scale dO_i . E_j, scale dO_i . v_j and, of rows before i, X_i . E_j, X_i . v_j

They are kept in the order q against k; k against k; or q against b, a against b, q against k, a
against k. The gradients by v and beta need no more than what is at hand here.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_decay import rounded
from deltarule.kernels.triton.channel_far import each_chunk
from deltarule.kernels.triton.tiles import load_rows


@triton.jit
def pairs_of_chunk(
    i_m, i_h, first, rows, v, beta, errors, d_o, d_errors, d_values, pairs, d_v, d_beta,
    scale, T, s_beta_b, s_beta_t, s_beta_h,
    HV: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `pair_gradients_kernel` does with one chunk of one value head."""
    i_b, i_t = first // T, first % T
    i_slot = i_m.to(tl.int64) * HV + i_h
    o_r = tl.arange(0, BT)
    o_i, o_j = o_r[:, None], o_r[None, :]
    m_r = o_r < rows
    m_q = m_r & (o_r % N_STEPS == N_STEPS - 1)
    WHOLE: tl.constexpr = V % BV == 0
    p_do = d_o + (first * HV + i_h) * V
    row_v = (first * N_STEPS * HV + i_h) * V
    b_beta = tl.full([BT], 1.0, tl.float32)
    if ERASE == "tied":
        p_beta = beta + i_b * s_beta_b + i_t * N_STEPS * s_beta_t + i_h * s_beta_h
        b_beta = tl.load(p_beta + o_r * s_beta_t, mask=m_r, other=0.0).to(tl.float32)
    b_g, b_g2 = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    b_g3, b_g4 = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    b_dbeta = tl.zeros([BT], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = load_rows(p_do, o_r // N_STEPS, m_q, o_v, V, HV * V, WHOLE)
        b_x = load_rows(d_errors + i_slot * BT * V, o_r, o_r < BT, o_v, V, V, WHOLE)
        if ERASE == "none":
            b_e = load_rows(v + row_v, o_r, m_r, o_v, V, HV * V, WHOLE)
        else:
            b_e = load_rows(errors + i_slot * BT * V, o_r, o_r < BT, o_v, V, V, WHOLE)
            b_g2 = tl.dot(b_x, tl.trans(b_e), acc=b_g2, input_precision=PRECISION)
        b_g = tl.dot(b_do, tl.trans(b_e), acc=b_g, input_precision=PRECISION)
        b_dv = b_x
        if ERASE == "tied":
            b_dbeta += tl.sum(b_e.to(tl.float32) * b_x.to(tl.float32), axis=1)
            b_dv = b_x.to(tl.float32) * b_beta[:, None]
        if ERASE == "free":
            b_v = load_rows(v + row_v, o_r, m_r, o_v, V, HV * V, WHOLE)
            b_g3 = tl.dot(b_do, tl.trans(b_v), acc=b_g3, input_precision=PRECISION)
            b_g4 = tl.dot(b_x, tl.trans(b_v), acc=b_g4, input_precision=PRECISION)
            b_dv = load_rows(d_values + i_slot * BT * V, o_r, o_r < BT, o_v, V, V, WHOLE)
        p_dv = d_v + row_v + o_r[:, None] * (HV * V) + o_v[None, :]
        tl.store(p_dv, b_dv.to(d_v.dtype.element_ty), mask=m_r[:, None] & (o_v < V)[None, :])
    COUNT: tl.constexpr = 1 if ERASE == "none" else 2 if ERASE == "tied" else 4
    p_g = pairs + i_slot * COUNT * BT * BT + o_i * BT + o_j
    store_pairs(p_g, tl.where(o_j <= o_i, b_g * scale * b_beta[None, :], 0.0), PRECISION)
    if ERASE == "tied":
        b_g2 *= -b_beta[:, None] * b_beta[None, :]
        p_dbeta = d_beta + (first * N_STEPS + o_r) * HV + i_h
        tl.store(p_dbeta, b_dbeta, mask=m_r)
    if ERASE != "none":
        store_pairs(p_g + BT * BT, tl.where(o_j < o_i, b_g2, 0.0), PRECISION)
    if ERASE == "free":
        store_pairs(p_g + 2 * BT * BT, tl.where(o_j <= o_i, b_g3 * scale, 0.0), PRECISION)
        store_pairs(p_g + 3 * BT * BT, tl.where(o_j < o_i, b_g4, 0.0), PRECISION)


@triton.jit
def store_pairs(p_g, b_g, PRECISION: tl.constexpr):
    """Write gradients by scores, with the digits that the products after them keep."""
    tl.store(p_g, rounded(b_g, PRECISION).to(p_g.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def pair_gradients_kernel(
    v, beta, cu_seqlens, known, errors, d_o, d_errors, d_values, pairs, d_v, d_beta, chunks,
    scale, T, N, s_beta_b, s_beta_t, s_beta_h,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pairs [M, HV, 1, 2 or 4, BT, BT], and d_v and d_beta in the layouts of v and beta."""
    each_chunk(
        pairs_of_chunk,
        (
            v, beta, errors, d_o, d_errors, d_values, pairs, d_v, d_beta,
            scale, T, s_beta_b, s_beta_t, s_beta_h, HV, V, N_STEPS, BT, BV, ERASE, PRECISION,
        ),
        known, cu_seqlens, chunks, T, N, HV, H, HV, K, N_STEPS, CT, PACKED,
    )  # fmt: skip
