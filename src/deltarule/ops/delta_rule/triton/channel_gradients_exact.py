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

from typing import NamedTuple

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
    Sides,
    level_gradients,
    steep_gradients,
    whole_gradients,
)
from deltarule.ops.delta_rule.triton.channel_scores_exact import Keys
from deltarule.ops.delta_rule.triton.gradients import Around
from deltarule.ops.delta_rule.triton.tiles import (
    Gates,
    Sizes,
    decays_of,
    inverse_norms,
    load_beta,
    load_channels,
    load_rows,
)


class Left(NamedTuple):
    """What the gradients of pairs and the decays left, where gradients go, and the scale."""

    pairs: tl.tensor
    sums: tl.tensor
    chunk_decay: tl.tensor
    d_q: tl.tensor
    d_k: tl.tensor
    d_a: tl.tensor
    d_b: tl.tensor
    d_log_decay: tl.tensor
    scale: tl.tensor


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
def decay_gradients(p_s, p_g, p_c, p_dg, rows, s_decay_t, s_decay_k, S: tl.constexpr):
    """dlog_decay of a chunk, row after row of four blocks at once, from what replaced the sums."""
    o_k, o_b = tl.arange(0, S.BK), tl.arange(0, 4) * BLOCK
    m_k = o_k < S.K
    b_last = tl.zeros([4, S.BK], tl.float32)
    b_z = tl.zeros([4, S.BK], tl.float32)
    for row in tl.static_range(BLOCK):
        b_z += load_sums(p_s, o_b + row, o_k, S.K)
        b_last += load_sums(p_s + LAST_ROWS * S.K, o_b + row, o_k, S.K)
    # Every decay of the chunk takes part in what reaches its end.
    b_end = tl.load(p_s + BOTH * S.K + o_k, mask=m_k, other=0.0)
    b_end = tl.sum(b_last, axis=0) + b_end * tl.load(p_c + o_k, mask=m_k, other=0.0)
    b_sum = tl.cumsum(b_z, axis=0, reverse=True) - b_z + b_end[None, :]
    for up in tl.static_range(0, BLOCK, 4):
        # Loads first: they wait for memory together.
        b_0 = load_sums(p_s, o_b + BLOCK - 1 - up, o_k, S.K)
        b_1 = load_sums(p_s, o_b + BLOCK - 2 - up, o_k, S.K)
        b_2 = load_sums(p_s, o_b + BLOCK - 3 - up, o_k, S.K)
        b_3 = load_sums(p_s, o_b + BLOCK - 4 - up, o_k, S.K)
        b_1 += b_0
        b_2 += b_1
        b_3 += b_2
        for step in tl.static_range(4):
            o_r = o_b + BLOCK - 1 - up - step
            b_row = b_sum + (b_0 if step == 0 else b_1 if step == 1 else b_2 if step == 2 else b_3)
            if S.ERASE == "free":
                b_row -= load_sums(p_s + OWN_ROWS * S.K, o_r, o_k, S.K)
            b_g = channel_log_decay(p_g, o_r, rows, o_k, s_decay_t, s_decay_k, S.K, S.N_STEPS)
            m_r = (o_r < rows) & (o_r % S.N_STEPS == 0)
            p_r = p_dg + (o_r // S.N_STEPS)[:, None] * (S.HV * S.K) + o_k[None, :]
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
    i_m, i_h, first, rows, x, g, d_values, pairs, d_v, d_beta, scale, S: tl.constexpr
):
    """What `pair_gradients_kernel` does with one chunk of one value head."""
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    o_r = tl.arange(0, S.BT)
    o_i, o_j = o_r[:, None], o_r[None, :]
    m_r = o_r < rows
    m_q = m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    WHOLE: tl.constexpr = S.V % S.BV == 0
    p_do = x.d_o + (first * S.HV + i_h) * S.V
    row_v = (first * S.N_STEPS * S.HV + i_h) * S.V
    b_beta = tl.full([S.BT], 1.0, tl.float32)
    if S.ERASE == "tied":
        b_beta = load_beta(g, first, i_h, o_r, m_r, S)
    b_g, b_g2 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    b_g3, b_g4 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    b_dbeta = tl.zeros([S.BT], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_do = load_rows(p_do, o_r // S.N_STEPS, m_q, o_v, S.V, S.HV * S.V, WHOLE)
        b_x = load_rows(x.d_errors + i_slot * S.BT * S.V, o_r, o_r < S.BT, o_v, S.V, S.V, WHOLE)
        if S.ERASE == "none":
            b_e = load_rows(x.v + row_v, o_r, m_r, o_v, S.V, S.HV * S.V, WHOLE)
        else:
            b_e = load_rows(x.errors + i_slot * S.BT * S.V, o_r, o_r < S.BT, o_v, S.V, S.V, WHOLE)
            b_g2 = tl.dot(b_x, tl.trans(b_e), acc=b_g2, input_precision=S.PRECISION)
        b_g = tl.dot(b_do, tl.trans(b_e), acc=b_g, input_precision=S.PRECISION)
        b_dv = b_x
        if S.ERASE == "tied":
            b_dbeta += tl.sum(b_e.to(tl.float32) * b_x.to(tl.float32), axis=1)
            b_dv = b_x.to(tl.float32) * b_beta[:, None]
        if S.ERASE == "free":
            b_v = load_rows(x.v + row_v, o_r, m_r, o_v, S.V, S.HV * S.V, WHOLE)
            b_g3 = tl.dot(b_do, tl.trans(b_v), acc=b_g3, input_precision=S.PRECISION)
            b_g4 = tl.dot(b_x, tl.trans(b_v), acc=b_g4, input_precision=S.PRECISION)
            b_dv = load_rows(d_values + i_slot * S.BT * S.V, o_r, o_r < S.BT, o_v, S.V, S.V, WHOLE)
        p_dv = d_v + row_v + o_r[:, None] * (S.HV * S.V) + o_v[None, :]
        tl.store(p_dv, b_dv.to(d_v.dtype.element_ty), mask=m_r[:, None] & (o_v < S.V)[None, :])
    COUNT: tl.constexpr = 1 if S.ERASE == "none" else 2 if S.ERASE == "tied" else 4
    p_g = pairs + i_slot * COUNT * S.BT * S.BT + o_i * S.BT + o_j
    store_pairs(p_g, tl.where(o_j <= o_i, b_g * scale * b_beta[None, :], 0.0), S.PRECISION)
    if S.ERASE == "tied":
        b_g2 *= -b_beta[:, None] * b_beta[None, :]
        p_dbeta = d_beta + (first * S.N_STEPS + o_r) * S.HV + i_h
        tl.store(p_dbeta, b_dbeta, mask=m_r)
    if S.ERASE != "none":
        store_pairs(p_g + S.BT * S.BT, tl.where(o_j < o_i, b_g2, 0.0), S.PRECISION)
    if S.ERASE == "free":
        store_pairs(p_g + 2 * S.BT * S.BT, tl.where(o_j <= o_i, b_g3 * scale, 0.0), S.PRECISION)
        store_pairs(p_g + 3 * S.BT * S.BT, tl.where(o_j < o_i, b_g4, 0.0), S.PRECISION)


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
    S: tl.constexpr = Sizes(
        H=H, HV=HV, K=K, V=V, N_STEPS=N_STEPS, CT=CT, BT=BT, BV=BV, ERASE=ERASE,
        PRECISION=PRECISION,
    )  # fmt: skip
    x = Around(v, None, errors, d_o, None, d_errors)
    g = Gates(beta, None, T, s_beta_b, s_beta_t, s_beta_h, None, None, None, None)
    each_chunk(
        pairs_of_chunk, (x, g, d_values, pairs, d_v, d_beta, scale, S),
        known, cu_seqlens, chunks, T, N, HV, S, PACKED,
    )  # fmt: skip


@triton.jit
def sums_of_chunk(i_m, i_h, first, rows, g, chunk_decay, sums, S: tl.constexpr):
    """What `decay_sums_kernel` does with one chunk of one value head."""
    p_g = decays_of(g, first, i_h)
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    p_s = sums + i_slot * ROWS * S.K
    store_sums(p_g, p_s, rows, g.s_decay_t, g.s_decay_k, S.K, S.BK, S.N_STEPS, S.EXACT)
    store_block_decays(p_s, chunk_decay + i_slot * S.K, S.K, S.BK)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def decay_sums_kernel(
    log_decay, cu_seqlens, known, chunk_decay, sums, chunks, T, N, s_decay_b, s_decay_t,
    s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr,
    BK: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, ROWS, K] as channel_decay.py has them, and chunk_decay [M, HV, K]."""
    S: tl.constexpr = Sizes(H=H, HV=HV, K=K, N_STEPS=N_STEPS, CT=CT, BK=BK, EXACT=EXACT)
    g = Gates(None, log_decay, T, None, None, None, s_decay_b, s_decay_t, s_decay_h, s_decay_k)
    each_chunk(
        sums_of_chunk, (g, chunk_decay, sums, S), known, cu_seqlens, chunks, T, N, HV, S, PACKED
    )


@triton.jit
def state_gradients(x, i_slot, first, i_h, o_r, m_r, o_k, S: tl.constexpr):
    """S^T dO, S^T X, D^T E and D^T v of the channels o_k, and D S not yet summed over v."""
    m_q = m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    WHOLE: tl.constexpr = S.V % S.BV == 0
    p_do, row_v = x.d_o + (first * S.HV + i_h) * S.V, (first * S.N_STEPS * S.HV + i_h) * S.V
    b_q, b_x = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    b_e, b_v = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    b_both = tl.zeros([S.BV, S.BC], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        m_s = (o_v < S.V)[:, None] & (o_k < S.K)[None, :]
        o_s = i_slot * S.V * S.K + o_v[:, None] * S.K + o_k[None, :]
        b_s = tl.load(x.states + o_s, mask=m_s, other=0.0)
        b_d = tl.load(x.d_states + o_s, mask=m_s, other=0.0)
        b_both += b_s.to(tl.float32) * b_d.to(tl.float32)
        b_do = load_rows(p_do, o_r // S.N_STEPS, m_q, o_v, S.V, S.HV * S.V, WHOLE)
        b_q = tl.dot(b_do, b_s, acc=b_q, input_precision=S.PRECISION)
        if S.ERASE != "none":
            b_row = load_rows(
                x.d_errors + i_slot * S.BT * S.V, o_r, o_r < S.BT, o_v, S.V, S.V, WHOLE
            )
            b_x = tl.dot(b_row, b_s, acc=b_x, input_precision=S.PRECISION)
            b_row = load_rows(x.errors + i_slot * S.BT * S.V, o_r, o_r < S.BT, o_v, S.V, S.V, WHOLE)
            b_e = tl.dot(b_row, b_d, acc=b_e, input_precision=S.PRECISION)
        if S.ERASE != "tied":
            b_row = load_rows(x.v + row_v, o_r, m_r, o_v, S.V, S.HV * S.V, WHOLE)
            b_v = tl.dot(b_row, b_d, acc=b_v, input_precision=S.PRECISION)
    return b_q, b_x, b_e, b_v, b_both


@triton.jit
def channel_tile(i, x, y, g, norms, i_m, i_key, i_k, first, rows, steep, S: tl.constexpr):
    """Gradients by the channels from i_k on; returns x . dx of every row of q and k."""
    FREE: tl.constexpr = S.ERASE == "free"
    COUNT: tl.constexpr = 4 if FREE else 2 if S.ERASE == "tied" else 1
    o_r, o_k = tl.arange(0, S.BT), i_k + tl.arange(0, S.BC)
    m_r, m_k = o_r < rows, (o_k < S.K)[None, :]
    o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    row_q, row_k = (first * S.H + i_key) * S.K, (first * S.N_STEPS * S.H + i_key) * S.K
    b_q = load_channels(i.q + row_q, o_t, m_q, o_k, S.H * S.K, S.K) * norms[0]
    b_k = load_channels(i.k + row_k, o_r, m_r, o_k, S.H * S.K, S.K) * norms[1]
    b_dq, b_dk = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    for i_g in range(S.HV // S.H):
        i_h = i_key * (S.HV // S.H) + i_g
        i_slot, row_a = i_m.to(tl.int64) * S.HV + i_h, (first * S.HV + i_h) * S.K
        b_x, b_y = b_k, b_k
        if FREE:
            b_x = load_channels(i.a + row_a, o_r, m_r, o_k, S.HV * S.K, S.K)
            b_y = load_channels(i.b + row_a, o_r, m_r, o_k, S.HV * S.K, S.K)
        e = Sides(b_q, b_x, b_y, b_k)
        b_dqh, b_row, b_col, b_colk, b_both = state_gradients(
            x, i_slot, first, i_h, o_r, m_r, o_k, S
        )
        b_dqh *= y.scale
        if S.ERASE == "tied":
            b_beta = load_beta(g, first, i_h, o_r, m_r, S)
            b_row *= -b_beta[:, None]
            b_col *= b_beta[:, None]
        if S.ERASE == "none":
            b_col = b_colk
        p_p = y.pairs + i_slot * COUNT * S.BT * S.BT
        if S.HAS_DECAY:
            p_s = y.sums + i_slot * ROWS * S.K
            b_start = of_block(p_s, BEFORE, o_r, o_k, S.K)
            b_dqh *= lead_decay(p_s, o_r, o_k, S.K, True) * b_start
            b_row *= lead_decay(p_s, o_r, o_k, S.K, not FREE) * b_start
            b_end = tail_decay(p_s, load_sums(p_s, o_r, o_k, S.K), o_r, o_k, S.K, S.EXACT)
            b_end *= of_block(p_s, AFTER, o_r, o_k, S.K)
            b_col *= b_end
            b_last = b_y * b_col
            if FREE:
                b_colk *= b_end
                b_last += b_k * b_colk
            for level in tl.static_range(3):
                b_dqh, b_row, b_col, b_colk = level_gradients(
                    p_p, p_s, e, b_dqh, b_row, b_col, b_colk, o_r, o_k, level, S
                )
            if steep:
                p_g, s_t, s_k = decays_of(g, first, i_h), g.s_decay_t, g.s_decay_k
                b_g = channel_log_decay(p_g, o_r, rows, o_k, s_t, s_k, S.K, S.N_STEPS)
                b_dqh, b_row, b_col, b_colk = steep_gradients(
                    p_p, p_s, e, b_g, b_dqh, b_row, b_col, b_colk, o_r, o_k, S
                )
            b_z = b_q * b_dqh + b_x * b_row - b_y * b_col
            # All have read the sums of these channels, and z takes their place.
            tl.debug_barrier()
            if FREE:
                b_z -= b_k * b_colk
                store_rows(p_s + OWN_ROWS * S.K, b_x * b_row, o_r, o_k, S.K)
            store_rows(p_s, b_z, o_r, o_k, S.K)
            store_rows(p_s + LAST_ROWS * S.K, b_last, o_r, o_k, S.K)
            tl.store(p_s + BOTH * S.K + o_k, tl.sum(b_both, axis=0), mask=o_k < S.K)
        else:
            b_dqh, b_row, b_col, b_colk = whole_gradients(p_p, e, b_dqh, b_row, b_col, b_colk, S)
        b_dq += b_dqh
        if FREE:
            p_d = row_a + o_r[:, None] * (S.HV * S.K) + o_k[None, :]
            tl.store(y.d_a + p_d, b_row.to(y.d_a.dtype.element_ty), mask=m_r[:, None] & m_k)
            tl.store(y.d_b + p_d, b_col.to(y.d_b.dtype.element_ty), mask=m_r[:, None] & m_k)
            b_dk += b_colk
        else:
            b_dk += b_row + b_col if S.ERASE == "tied" else b_col
    p_d = row_q + o_t[:, None] * (S.H * S.K) + o_k[None, :]
    tl.store(y.d_q + p_d, b_dq.to(y.d_q.dtype.element_ty), mask=m_q[:, None] & m_k)
    p_d = row_k + o_r[:, None] * (S.H * S.K) + o_k[None, :]
    tl.store(y.d_k + p_d, b_dk.to(y.d_k.dtype.element_ty), mask=m_r[:, None] & m_k)
    return row_products(b_q, b_dq, S.UNIT_NORM), row_products(b_k, b_dk, S.UNIT_NORM)


@triton.jit
def row_products(b_x, b_y, WANTED: tl.constexpr):
    """x . y of every row, or zeros unasked."""
    if WANTED:
        b_sum = tl.sum(b_x * b_y, axis=1)
    else:
        b_sum = tl.zeros([b_x.shape[0]], tl.float32)
    return b_sum


@triton.jit
def gradients_of_chunk(i_m, i_key, first, rows, i, x, y, g, S: tl.constexpr):
    """What `channel_gradients_kernel` does with one chunk of one key head."""
    o_r = tl.arange(0, S.BT)
    m_r = o_r < rows
    o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    row_q, row_k = (first * S.H + i_key) * S.K, (first * S.N_STEPS * S.H + i_key) * S.K
    norm_q = inverse_norms(i.q + row_q, o_t, m_q, S.H * S.K, S.K, S.BC, S.UNIT_NORM)[:, None]
    norm_k = inverse_norms(i.k + row_k, o_r, m_r, S.H * S.K, S.K, S.BC, S.UNIT_NORM)[:, None]
    dot_q, dot_k = tl.zeros([S.BT], tl.float32), tl.zeros([S.BT], tl.float32)
    least = 0.0
    if S.HAS_DECAY:
        for i_g in range(S.HV // S.H):
            i_slot = i_m.to(tl.int64) * S.HV + i_key * (S.HV // S.H) + i_g
            least = tl.minimum(least, tl.load(y.sums + (i_slot * ROWS + LEAST) * S.K))
    for i_k in range(0, S.K, S.BC):
        dot_qk = channel_tile(
            i, x, y, g, (norm_q, norm_k), i_m, i_key, i_k, first, rows, least < -S.BAR, S
        )
        dot_q += dot_qk[0]
        dot_k += dot_qk[1]
    tl.debug_barrier()
    if S.HAS_DECAY:
        for i_g in range(S.HV // S.H):
            i_h = i_key * (S.HV // S.H) + i_g
            i_slot = i_m.to(tl.int64) * S.HV + i_h
            p_g = decays_of(g, first, i_h)
            decay_gradients(
                y.sums + i_slot * ROWS * S.K, p_g, y.chunk_decay + i_slot * S.K,
                y.d_log_decay + (first * S.HV + i_h) * S.K, rows, g.s_decay_t, g.s_decay_k, S,
            )  # fmt: skip
    if S.UNIT_NORM:
        for i_k in range(0, S.K, S.BC):
            o_k = i_k + tl.arange(0, S.BC)
            unit_norm_backward(
                i.q + row_q, y.d_q + row_q, norm_q, dot_q, o_t, m_q, o_k, S.H * S.K, S.K
            )
            unit_norm_backward(
                i.k + row_k, y.d_k + row_k, norm_k, dot_k, o_r, m_r, o_k, S.H * S.K, S.K
            )


@triton.jit
def unit_norm_backward(p_x, p_d, b_norm, b_dot, o_r, m_r, o_k, stride, K: tl.constexpr):
    """With y = x / |x| and dy in the place of dx: dx = (dy - y (y . dy)) / |x|."""
    b_y = load_channels(p_x, o_r, m_r, o_k, stride, K) * b_norm
    b_dy = load_channels(p_d, o_r, m_r, o_k, stride, K)
    b_dx = (b_dy - b_y * b_dot[:, None]) * b_norm
    p_d += o_r[:, None] * stride + o_k[None, :]
    tl.store(p_d, b_dx.to(p_d.dtype.element_ty), mask=m_r[:, None] & (o_k < K)[None, :])


@triton.jit
def steep_chunk(i_m, i_key, first, rows, i, x, y, g, S: tl.constexpr):
    """`gradients_of_chunk`, if the chunk is steep."""
    if is_steep(y.sums, i_m, i_key, S.H, S.HV, S.K):
        gradients_of_chunk(i_m, i_key, first, rows, i, x, y, g, S)


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
    S: tl.constexpr = Sizes(
        H=H, HV=HV, K=K, V=V, N_STEPS=N_STEPS, CT=CT, BT=BT, BK=BK, BV=BV, BC=BC, ERASE=ERASE,
        HAS_DECAY=HAS_DECAY, UNIT_NORM=UNIT_NORM, PRECISION=PRECISION, EXACT=EXACT, BAR=BAR,
    )  # fmt: skip
    g = Gates(
        beta, log_decay, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k
    )
    x = Around(v, states, errors, d_o, d_states, d_errors)
    y = Left(pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, d_log_decay, scale)
    each_chunk(
        steep_chunk if STEEP_ALONE else gradients_of_chunk, (Keys(q, k, a, b), x, y, g, S),
        chunk_decay if FAR_ALONE else None, cu_seqlens, chunks, T, N, H, S, PACKED,
    )  # fmt: skip
