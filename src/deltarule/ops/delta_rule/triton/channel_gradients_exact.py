"""The gradients of a chunk from the states around it, all chunks at once; decay per channel.

S is the state at the chunk's start, D the gradient by the state at its end, E the prediction errors
(free: what is written along b), X the gradient by F / beta (by w). A first kernel leaves the
gradients by the scores of every pair, a second one takes them through the decays e = decay(j, i]:

                pairs G_ij                               rows x    columns y     D^T
    none        scale dO_i . v_j                         q         k             v_j
    tied        scale dO_i . w_j,  -beta_i X_i . w_j     q, k      k             w_j = beta_j E_j
    free        scale dO_i . E_j,  scale dO_i . v_j      q         b, k          E_j, v_j
                X_i . E_j,  X_i . v_j                    a         b, k          (decay(j, i))

    dx_i = decay[0, i] S^T (scale dO_i, -beta_i X_i or X_i) + sum_j G_ij e_ij y_j
    dy_j = decay(j, end] D^T (..) + sum_i G_ij e_ij x_i

`pair_gradients_kernel` has the pairs G, channel_levels.py the sums over them,
`decay_gradients` what the decays get. A program takes one chunk of one key head and adds up its
value heads in order.
"""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.channel_decay import (
    AFTER,
    BEFORE,
    BLOCK,
    GONE,
    LEAST,
    ROWS,
    channel_log_decay,
    each_chunk,
    is_steep,
    lead_decay,
    load_sums,
    of_block,
    rounded,
    store_block_decays,
    store_sums,
    tail_decay,
)
from deltarule.ops.delta_rule.triton.channel_levels import (
    level_gradients,
    steep_gradients,
    whole_gradients,
)
from deltarule.ops.delta_rule.triton.tiles import inverse_norms, load_channels, load_rows

# The gradient by decays per channel, once everything else of a chunk is known: device functions.
#
# A decay reaches every pair around it. With z_i = sum x_i dx_i - sum y_i dy_i, and what reaches the
# end of the chunk, sum_j y_j decay(j, end] D^T (..)_j + decay[0, end] sum_v D S, all per channel,
#
#     dlog_decay_t = sum of z over the rows from token t to the chunk's end, and what reaches it
#
# A free erase leaves its own row's decay out: its x_i dx_i is in z, and taken from row i again.


# Rows of a chunk's sums that the backward uses anew: z, and below them
BOTH, LAST_ROWS, OWN_ROWS = tl.constexpr(81), tl.constexpr(84), tl.constexpr(148)


@triton.jit
def store_rows(p_s, b_x, o_r, o_k, K: tl.constexpr):
    """Write rows into a chunk's sums."""
    tl.store(p_s + o_r[:, None] * K + o_k[None, :], b_x, mask=(o_k < K)[None, :])


@triton.jit
def decay_gradients(
    p_s, p_g, p_c, p_dg, rows, s_decay_t, s_decay_k, HV: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, N_STEPS: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """dlog_decay of a chunk, row after row of four blocks at once, from what replaced the sums."""
    o_k, o_b = tl.arange(0, BK), tl.arange(0, 4) * BLOCK
    m_k = o_k < K
    b_last = tl.zeros([4, BK], tl.float32)
    b_z = tl.zeros([4, BK], tl.float32)
    for row in tl.static_range(BLOCK):
        b_z += load_sums(p_s, o_b + row, o_k, K)
        b_last += load_sums(p_s + LAST_ROWS * K, o_b + row, o_k, K)
    # Every decay of the chunk takes part in what reaches its end.
    b_end = tl.load(p_s + BOTH * K + o_k, mask=m_k, other=0.0)
    b_end = tl.sum(b_last, axis=0) + b_end * tl.load(p_c + o_k, mask=m_k, other=0.0)
    b_sum = tl.cumsum(b_z, axis=0, reverse=True) - b_z + b_end[None, :]
    for up in tl.static_range(0, BLOCK, 4):
        # Loads first: they wait for memory together.
        b_0 = load_sums(p_s, o_b + BLOCK - 1 - up, o_k, K)
        b_1 = load_sums(p_s, o_b + BLOCK - 2 - up, o_k, K)
        b_2 = load_sums(p_s, o_b + BLOCK - 3 - up, o_k, K)
        b_3 = load_sums(p_s, o_b + BLOCK - 4 - up, o_k, K)
        b_1 += b_0
        b_2 += b_1
        b_3 += b_2
        for step in tl.static_range(4):
            o_r = o_b + BLOCK - 1 - up - step
            b_row = b_sum + (b_0 if step == 0 else b_1 if step == 1 else b_2 if step == 2 else b_3)
            if FREE:
                b_row -= load_sums(p_s + OWN_ROWS * K, o_r, o_k, K)
            b_g = channel_log_decay(p_g, o_r, rows, o_k, s_decay_t, s_decay_k, K, N_STEPS)
            m_r = (o_r < rows) & (o_r % N_STEPS == 0)
            p_r = p_dg + (o_r // N_STEPS)[:, None] * (HV * K) + o_k[None, :]
            tl.store(p_r, tl.where(b_g == GONE, 0.0, b_row), mask=m_r[:, None] & m_k[None, :])
        b_sum += b_3


# The gradients by the scores of every pair of rows in a chunk, before any decay.
#
#     none    scale dO_i . v_j                            for the rows j up to row i
#     tied    scale dO_i . w_j and, of rows before i, -beta_i X_i . w_j              w_j = beta_j
# E_j
#     free    scale dO_i . E_j, scale dO_i . v_j and, of rows before i, X_i . E_j, X_i . v_j
#
# They are kept in the order q against k; k against k; or q against b, a against b, q against k, a
# against k. The gradients by v and beta need no more than what is at hand here.


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


@triton.jit
def sums_of_chunk(
    i_m, i_h, first, rows, log_decay, chunk_decay, sums, T, s_decay_b, s_decay_t, s_decay_h,
    s_decay_k,
    HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What `decay_sums_kernel` does with one chunk of one value head."""
    p_g = log_decay + first // T * s_decay_b + first % T * s_decay_t + i_h * s_decay_h
    i_slot = i_m.to(tl.int64) * HV + i_h
    p_s = sums + i_slot * ROWS * K
    store_sums(p_g, p_s, rows, s_decay_t, s_decay_k, K, BK, N_STEPS, EXACT)
    store_block_decays(p_s, chunk_decay + i_slot * K, K, BK)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def decay_sums_kernel(
    log_decay, cu_seqlens, known, chunk_decay, sums, chunks, T, N, s_decay_b, s_decay_t,
    s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr,
    BK: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, ROWS, K] as channel_decay.py has them, and chunk_decay [M, HV, K]."""
    each_chunk(
        sums_of_chunk,
        (
            log_decay, chunk_decay, sums, T, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
            HV, K, N_STEPS, BK, EXACT,
        ),
        known, cu_seqlens, chunks, T, N, HV, H, HV, K, N_STEPS, CT, PACKED,
    )  # fmt: skip


@triton.jit
def state_gradients(
    v, errors, d_o, d_errors, states, d_states, i_slot, first, i_h, o_r, m_r, o_k,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S^T dO, S^T X, D^T E and D^T v of the channels o_k, and D S not yet summed over v."""
    m_q = m_r & (o_r % N_STEPS == N_STEPS - 1)
    WHOLE: tl.constexpr = V % BV == 0
    p_do, row_v = d_o + (first * HV + i_h) * V, (first * N_STEPS * HV + i_h) * V
    b_q, b_x = tl.zeros([BT, BC], tl.float32), tl.zeros([BT, BC], tl.float32)
    b_e, b_v = tl.zeros([BT, BC], tl.float32), tl.zeros([BT, BC], tl.float32)
    b_both = tl.zeros([BV, BC], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
        o_s = i_slot * V * K + o_v[:, None] * K + o_k[None, :]
        b_s = tl.load(states + o_s, mask=m_s, other=0.0)
        b_d = tl.load(d_states + o_s, mask=m_s, other=0.0)
        b_both += b_s.to(tl.float32) * b_d.to(tl.float32)
        b_do = load_rows(p_do, o_r // N_STEPS, m_q, o_v, V, HV * V, WHOLE)
        b_q = tl.dot(b_do, b_s, acc=b_q, input_precision=PRECISION)
        if ERASE != "none":
            b_row = load_rows(d_errors + i_slot * BT * V, o_r, o_r < BT, o_v, V, V, WHOLE)
            b_x = tl.dot(b_row, b_s, acc=b_x, input_precision=PRECISION)
            b_row = load_rows(errors + i_slot * BT * V, o_r, o_r < BT, o_v, V, V, WHOLE)
            b_e = tl.dot(b_row, b_d, acc=b_e, input_precision=PRECISION)
        if ERASE != "tied":
            b_row = load_rows(v + row_v, o_r, m_r, o_v, V, HV * V, WHOLE)
            b_v = tl.dot(b_row, b_d, acc=b_v, input_precision=PRECISION)
    return b_q, b_x, b_e, b_v, b_both


@triton.jit
def channel_tile(
    q, k, v, a, b, beta, log_decay, states, errors, d_o, d_states, d_errors,
    pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, norm_q, norm_k, i_m, i_key, i_k, first, rows,
    steep, scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    ERASE: tl.constexpr, HAS_DECAY: tl.constexpr, UNIT_NORM: tl.constexpr, BAR: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients by the channels from i_k on; returns x . dx of every row of q and k."""
    FREE: tl.constexpr = ERASE == "free"
    COUNT: tl.constexpr = 4 if FREE else 2 if ERASE == "tied" else 1
    i_b, i_t = first // T, first % T
    o_r, o_k = tl.arange(0, BT), i_k + tl.arange(0, BC)
    m_r, m_k = o_r < rows, (o_k < K)[None, :]
    o_t, m_q = o_r // N_STEPS, m_r & (o_r % N_STEPS == N_STEPS - 1)
    row_q, row_k = (first * H + i_key) * K, (first * N_STEPS * H + i_key) * K
    b_q = load_channels(q + row_q, o_t, m_q, o_k, H * K, K) * norm_q
    b_k = load_channels(k + row_k, o_r, m_r, o_k, H * K, K) * norm_k
    b_dq, b_dk = tl.zeros([BT, BC], tl.float32), tl.zeros([BT, BC], tl.float32)
    for i_g in range(HV // H):
        i_h = i_key * (HV // H) + i_g
        i_slot, row_a = i_m.to(tl.int64) * HV + i_h, (first * HV + i_h) * K
        b_x, b_y = b_k, b_k
        if FREE:
            b_x = load_channels(a + row_a, o_r, m_r, o_k, HV * K, K)
            b_y = load_channels(b + row_a, o_r, m_r, o_k, HV * K, K)
        b_dqh, b_row, b_col, b_colk, b_both = state_gradients(
            v, errors, d_o, d_errors, states, d_states, i_slot, first, i_h, o_r, m_r, o_k,
            HV, K, V, N_STEPS, BT, BV, BC, ERASE, PRECISION,
        )  # fmt: skip
        b_dqh *= scale
        if ERASE == "tied":
            p_beta = beta + i_b * s_beta_b + i_t * N_STEPS * s_beta_t + i_h * s_beta_h
            b_beta = tl.load(p_beta + o_r * s_beta_t, mask=m_r, other=0.0).to(tl.float32)
            b_row *= -b_beta[:, None]
            b_col *= b_beta[:, None]
        if ERASE == "none":
            b_col = b_colk
        p_p = pairs + i_slot * COUNT * BT * BT
        if HAS_DECAY:
            p_s = sums + i_slot * ROWS * K
            b_start = of_block(p_s, BEFORE, o_r, o_k, K)
            b_dqh *= lead_decay(p_s, o_r, o_k, K, True) * b_start
            b_row *= lead_decay(p_s, o_r, o_k, K, not FREE) * b_start
            b_end = tail_decay(p_s, load_sums(p_s, o_r, o_k, K), o_r, o_k, K, EXACT)
            b_end *= of_block(p_s, AFTER, o_r, o_k, K)
            b_col *= b_end
            b_last = b_y * b_col
            if FREE:
                b_colk *= b_end
                b_last += b_k * b_colk
            for level in tl.static_range(3):
                b_dqh, b_row, b_col, b_colk = level_gradients(
                    p_p, p_s, b_q, b_x, b_y, b_k, b_dqh, b_row, b_col, b_colk, o_r, o_k, K,
                    BT, level, ERASE, BAR, EXACT, PRECISION,
                )  # fmt: skip
            if steep:
                p_g = log_decay + i_b * s_decay_b + i_t * s_decay_t + i_h * s_decay_h
                b_dqh, b_row, b_col, b_colk = steep_gradients(
                    p_p, p_s, p_g, b_q, b_x, b_y, b_k, b_dqh, b_row, b_col, b_colk, o_r, rows, o_k,
                    s_decay_t, s_decay_k, K, N_STEPS, BT, ERASE, BAR,
                )  # fmt: skip
            b_z = b_q * b_dqh + b_x * b_row - b_y * b_col
            # All have read the sums of these channels, and z takes their place.
            tl.debug_barrier()
            if FREE:
                b_z -= b_k * b_colk
                store_rows(p_s + OWN_ROWS * K, b_x * b_row, o_r, o_k, K)
            store_rows(p_s, b_z, o_r, o_k, K)
            store_rows(p_s + LAST_ROWS * K, b_last, o_r, o_k, K)
            tl.store(p_s + BOTH * K + o_k, tl.sum(b_both, axis=0), mask=o_k < K)
        else:
            b_dqh, b_row, b_col, b_colk = whole_gradients(
                p_p, b_q, b_x, b_y, b_k, b_dqh, b_row, b_col, b_colk, BT, PRECISION
            )
        b_dq += b_dqh
        if FREE:
            p_d = row_a + o_r[:, None] * (HV * K) + o_k[None, :]
            tl.store(d_a + p_d, b_row.to(d_a.dtype.element_ty), mask=m_r[:, None] & m_k)
            tl.store(d_b + p_d, b_col.to(d_b.dtype.element_ty), mask=m_r[:, None] & m_k)
            b_dk += b_colk
        else:
            b_dk += b_row + b_col if ERASE == "tied" else b_col
    p_d = row_q + o_t[:, None] * (H * K) + o_k[None, :]
    tl.store(d_q + p_d, b_dq.to(d_q.dtype.element_ty), mask=m_q[:, None] & m_k)
    p_d = row_k + o_r[:, None] * (H * K) + o_k[None, :]
    tl.store(d_k + p_d, b_dk.to(d_k.dtype.element_ty), mask=m_r[:, None] & m_k)
    return row_products(b_q, b_dq, UNIT_NORM), row_products(b_k, b_dk, UNIT_NORM)


@triton.jit
def row_products(b_x, b_y, WANTED: tl.constexpr):
    """x . y of every row, or zeros unasked."""
    if WANTED:
        b_sum = tl.sum(b_x * b_y, axis=1)
    else:
        b_sum = tl.zeros([b_x.shape[0]], tl.float32)
    return b_sum


@triton.jit
def gradients_of_chunk(
    i_m, i_key, first, rows, q, k, v, a, b, beta, log_decay, states, errors, d_o, d_states,
    d_errors, pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, d_log_decay,
    scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    ERASE: tl.constexpr, HAS_DECAY: tl.constexpr, UNIT_NORM: tl.constexpr,
    BAR: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `channel_gradients_kernel` does with one chunk of one key head."""
    o_r = tl.arange(0, BT)
    m_r = o_r < rows
    o_t, m_q = o_r // N_STEPS, m_r & (o_r % N_STEPS == N_STEPS - 1)
    row_q, row_k = (first * H + i_key) * K, (first * N_STEPS * H + i_key) * K
    norm_q = inverse_norms(q + row_q, o_t, m_q, H * K, K, BC, UNIT_NORM)[:, None]
    norm_k = inverse_norms(k + row_k, o_r, m_r, H * K, K, BC, UNIT_NORM)[:, None]
    dot_q, dot_k = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    least = 0.0
    if HAS_DECAY:
        for i_g in range(HV // H):
            i_slot = i_m.to(tl.int64) * HV + i_key * (HV // H) + i_g
            least = tl.minimum(least, tl.load(sums + (i_slot * ROWS + LEAST) * K))
    for i_k in range(0, K, BC):
        dot_qk = channel_tile(
            q, k, v, a, b, beta, log_decay, states, errors, d_o, d_states, d_errors, pairs, sums,
            chunk_decay, d_q, d_k, d_a, d_b, norm_q, norm_k, i_m, i_key, i_k, first, rows,
            least < -BAR, scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h,
            s_decay_k, H, HV, K, V, N_STEPS, BT, BV, BC, ERASE, HAS_DECAY, UNIT_NORM, BAR, EXACT,
            PRECISION,
        )  # fmt: skip
        dot_q += dot_qk[0]
        dot_k += dot_qk[1]
    tl.debug_barrier()
    if HAS_DECAY:
        for i_g in range(HV // H):
            i_h = i_key * (HV // H) + i_g
            i_slot = i_m.to(tl.int64) * HV + i_h
            p_g = log_decay + first // T * s_decay_b + first % T * s_decay_t + i_h * s_decay_h
            decay_gradients(
                sums + i_slot * ROWS * K, p_g, chunk_decay + i_slot * K,
                d_log_decay + (first * HV + i_h) * K, rows, s_decay_t, s_decay_k,
                HV, K, BK, N_STEPS, ERASE == "free",
            )  # fmt: skip
    if UNIT_NORM:
        for i_k in range(0, K, BC):
            o_k = i_k + tl.arange(0, BC)
            unit_norm_backward(q + row_q, d_q + row_q, norm_q, dot_q, o_t, m_q, o_k, H * K, K)
            unit_norm_backward(k + row_k, d_k + row_k, norm_k, dot_k, o_r, m_r, o_k, H * K, K)


@triton.jit
def unit_norm_backward(p_x, p_d, b_norm, b_dot, o_r, m_r, o_k, stride, K: tl.constexpr):
    """With y = x / |x| and dy in the place of dx: dx = (dy - y (y . dy)) / |x|."""
    b_y = load_channels(p_x, o_r, m_r, o_k, stride, K) * b_norm
    b_dy = load_channels(p_d, o_r, m_r, o_k, stride, K)
    b_dx = (b_dy - b_y * b_dot[:, None]) * b_norm
    p_d += o_r[:, None] * stride + o_k[None, :]
    tl.store(p_d, b_dx.to(p_d.dtype.element_ty), mask=m_r[:, None] & (o_k < K)[None, :])


@triton.jit
def steep_chunk(
    i_m, i_key, first, rows, q, k, v, a, b, beta, log_decay, states, errors, d_o, d_states,
    d_errors, pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, d_log_decay,
    scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    ERASE: tl.constexpr, HAS_DECAY: tl.constexpr, UNIT_NORM: tl.constexpr,
    BAR: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`gradients_of_chunk`, if the chunk is steep."""
    if is_steep(sums, i_m, i_key, H, HV, K):
        gradients_of_chunk(
            i_m, i_key, first, rows, q, k, v, a, b, beta, log_decay, states, errors, d_o, d_states,
            d_errors, pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, d_log_decay,
            scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
            H, HV, K, V, N_STEPS, BT, BK, BV, BC, ERASE, HAS_DECAY, UNIT_NORM, BAR, EXACT,
            PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def channel_gradients_kernel(
    q, k, v, a, b, beta, log_decay, cu_seqlens, states, errors, d_o, d_states, d_errors,
    pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, d_log_decay, chunks,
    scale, T, N, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    ERASE: tl.constexpr, HAS_DECAY: tl.constexpr, UNIT_NORM: tl.constexpr, PACKED: tl.constexpr,
    BAR: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    STEEP_ALONE: tl.constexpr, FAR_ALONE: tl.constexpr,
):  # fmt: skip
    """Gradients in the layouts of their tensors; that by log_decay [B, T, HV, K] in float32.

    Of all chunks, or of those that `even_chunks_kernel` leaves over.
    """
    each_chunk(
        steep_chunk if STEEP_ALONE else gradients_of_chunk,
        (
            q, k, v, a, b, beta, log_decay, states, errors, d_o, d_states, d_errors, pairs, sums,
            chunk_decay, d_q, d_k, d_a, d_b, d_log_decay,
            scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
            H, HV, K, V, N_STEPS, BT, BK, BV, BC, ERASE, HAS_DECAY, UNIT_NORM, BAR, EXACT,
            PRECISION,
        ),
        chunk_decay if FAR_ALONE else None, cu_seqlens, chunks, T, N,
        H, H, HV, K, N_STEPS, CT, PACKED,
    )  # fmt: skip
