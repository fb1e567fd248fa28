"""The gradients of a chunk from the states around it, all chunks at once; decay none or per head.

S is the state at the chunk's start, D the gradient by the state at its end, E the prediction
errors (without an erase: v), X the gradient by F / beta (by w), c_ij and m_ij the factors of
q_i . k_j in P and of k_i . k_j in M:

    GP_ij = c_ij dO_i . w_j                           w = beta E
    GM_ij = -m_ij beta_i X_i . w_j
    dq  = read S^T dO + GP k
    row = -erase beta S^T X + GM k                    through what k_i reads
    col = write D^T w + GP^T q + GM^T k               through what k_j writes
    dk  = row + col         dv = beta X         dbeta = E . X

A decay reaches every pair of rows around it, and the states around the chunk:

    dlog_decay_t = sum_{i >= t > j} (GP_ij q_i . k_j + GM_ij k_i . k_j)
                 + sum_{i >= t} (read_i q_i . S^T dO_i - erase_i beta_i k_i . S^T X_i)
                 + sum_{j < t} write_j k_j . D^T w_j + decay[0, end] <D, S>

A program takes one chunk of one key head, for dq or for the rest, and adds up the value heads in
order. In 16 bits the pairs are summed as those of the rows from t on less those of the columns from
t on, q . GP k and k . GP^T q, in which the pairs within cancel to float32. For float32 that is too
few digits: a third program sums the pairs across t alone. The scalings hold 1 / |x| where
`normalize_qk` asks for it; then dx <- dx - (x . dx) x / |x|^2.

In a loop with products, a tile is an operand of products and nothing else. One that is also read
into registers gets a single buffer from Triton (3.6 to 3.9), and the next tile overwrites it while
a product still reads it; one that was computed stays in registers, which the assembler of Triton
3.6 overwrites likewise. So rows are scaled after the products, and dv and <D, S> read tiles again.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.chunk import chunk_place
from deltarule.kernels.triton.decay_gradients import (
    pair_decay_gradients,
    pair_decays,
    row_products,
    store_decay_gradients,
    sums_around,
)
from deltarule.kernels.triton.pair_scores import inverse_norm
from deltarule.kernels.triton.tiles import (
    BETA,
    ERASE_ROW,
    READ,
    WRITE,
    load_errors,
    load_rows,
    row_scaling,
    state_tile,
)


@triton.jit(do_not_specialize=["T", "N"])
def gradients_kernel(
    q, k, v, log_decay, cu_seqlens, scalings, chunk_decay, decays, states, errors, d_o, d_states,
    d_errors, d_q, d_k, d_v, d_beta, d_log_decay, scale, T, N,
    s_decay_b, s_decay_t, s_decay_h, s_part,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_DECAY: tl.constexpr, TIED: tl.constexpr, UNIT_NORM: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients in the layouts of their tensors; d_beta and d_log_decay [3, ...] in float32.

    The parts of d_log_decay, one of each program, s_part elements apart, are to be added.
    """
    # The programs of a chunk run side by side, and share what they read in the cache.
    part, i_key, i_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
    if tokens <= 0:
        return
    tokens = tl.minimum(tokens, CT)
    o_i, o_r, o_k = tl.arange(0, BQ), tl.arange(0, BT), tl.arange(0, BK)
    m_i, m_r = o_i < tokens, o_r < tokens * N_STEPS
    p_q, p_k = q + (first * H + i_key) * K, k + (first * N_STEPS * H + i_key) * K
    norm_q, norm_k = tl.full([BQ], 1.0, tl.float32), tl.full([BT], 1.0, tl.float32)
    if UNIT_NORM:
        norm_q = inverse_norm(load_rows(p_q, o_i, m_i, o_k, K, H * K, K == BK))
        norm_k = inverse_norm(load_rows(p_k, o_r, m_r, o_k, K, H * K, K == BK))
    if HAS_DECAY:
        log_decay += (first // T) * s_decay_b + (first % T) * s_decay_t
    if part == 0:
        b_dq = tl.zeros([BQ, BK], tl.float32)
        for i_g in range(HV // H):
            i_h = i_key * (HV // H) + i_g
            i_slot = i_m.to(tl.int64) * HV + i_h
            p_g = log_decay
            if HAS_DECAY:
                p_g += i_h * s_decay_h
            b_dq = query_gradients(
                b_dq, p_q, p_k, norm_q * scale, norm_k, v, p_g, scalings, chunk_decay, decays,
                states, errors, d_o, d_states, d_log_decay, first, tokens, i_h, i_slot, s_decay_t,
                H, HV, K, V, N_STEPS, BT, BQ, BK, BV, HAS_DECAY, TIED, PRECISION,
            )  # fmt: skip
        if UNIT_NORM:
            b_q = load_rows(p_q, o_i, m_i, o_k, K, H * K, K == BK)
            b_dq = unit_norm_backward(b_q, norm_q, b_dq)
        p_dq = d_q + (first * H + i_key) * K + o_i[:, None] * (H * K) + o_k[None, :]
        tl.store(p_dq, b_dq.to(d_q.dtype.element_ty), mask=m_i[:, None] & (o_k < K)[None, :])
    elif part == 1:
        b_dk = tl.zeros([BT, BK], tl.float32)
        for i_g in range(HV // H):
            i_h = i_key * (HV // H) + i_g
            i_slot = i_m.to(tl.int64) * HV + i_h
            p_g, p_dg = log_decay, d_log_decay
            if HAS_DECAY:
                p_g += i_h * s_decay_h
                p_dg += s_part
            b_dk = key_gradients(
                b_dk, p_q, p_k, norm_q * scale, norm_k, v, p_g, scalings, decays, states, errors,
                d_o, d_states, d_errors, d_v, d_beta, p_dg, first, tokens, i_h, i_slot, s_decay_t,
                H, HV, K, V, N_STEPS, BT, BQ, BK, BV, HAS_DECAY, TIED, PRECISION,
            )  # fmt: skip
        if UNIT_NORM:
            b_k = load_rows(p_k, o_r, m_r, o_k, K, H * K, K == BK)
            b_dk = unit_norm_backward(b_k, norm_k, b_dk)
        p_dk = d_k + (first * N_STEPS * H + i_key) * K + o_r[:, None] * (H * K) + o_k[None, :]
        tl.store(p_dk, b_dk.to(d_k.dtype.element_ty), mask=m_r[:, None] & (o_k < K)[None, :])
    elif HAS_DECAY and PRECISION == "tf32x3":
        for i_g in range(HV // H):
            i_h = i_key * (HV // H) + i_g
            i_slot = i_m.to(tl.int64) * HV + i_h
            pair_decay_gradients(
                p_q, p_k, norm_q * scale, norm_k, v, log_decay + i_h * s_decay_h, scalings,
                decays, errors, d_o, d_errors, d_log_decay + 2 * s_part,
                first, tokens, i_h, i_slot, s_decay_t,
                H, HV, K, V, N_STEPS, BT, BQ, BK, BV, TIED, PRECISION,
            )  # fmt: skip


@triton.jit
def query_gradients(
    b_y, p_q, p_k, norm_q, norm_k, v, log_decay, scalings, chunk_decay, decays, states, errors,
    d_o, d_states, d_log_decay, first, tokens, i_h, i_slot, s_decay_t,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_DECAY: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one value head's part of dq to b_y; store its part of dlog_decay."""
    EXACT: tl.constexpr = PRECISION == "tf32x3"
    o_i, o_r, o_k = tl.arange(0, BQ), tl.arange(0, BT), tl.arange(0, BK)
    rows, m_i = tokens * N_STEPS, o_i < tokens
    p_do = d_o + (first * HV + i_h) * V
    b_g, b_row = tl.zeros([BQ, BT], tl.float32), tl.zeros([BQ, BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
        b_do = load_rows(p_do, o_i, m_i, o_v, V, HV * V, V % BV == 0)
        b_e = load_errors(
            v, errors, first, rows, i_h, i_slot, o_r, o_v, HV, V, N_STEPS, BT, BV, TIED
        )
        b_s = tl.load(state_tile(states, i_slot, 0, o_v, o_k, 1, K, V), mask=m_s, other=0.0)
        b_g = tl.dot(b_do, tl.trans(b_e), acc=b_g, input_precision=PRECISION)
        b_row = tl.dot(b_do, b_s, acc=b_row, input_precision=PRECISION)
    b_row *= row_scaling(scalings, i_slot, READ, norm_q, o_i, BT, HAS_DECAY)[:, None]
    b_key = norm_k * row_scaling(scalings, i_slot, BETA, 1.0, o_r, BT, TIED)
    m_pair = o_r[None, :] // N_STEPS <= o_i[:, None]
    b_g = tl.where(m_pair, b_g * norm_q[:, None] * b_key[None, :], 0.0)
    b_later = tl.zeros([BQ], tl.float32)
    if HAS_DECAY:
        b_g *= pair_decays(decays, i_slot, o_i, o_r, N_STEPS, BT)
        if EXACT:
            b_later = row_products(p_q, b_row, o_i, m_i, o_k, H * K, K)
    b_k = load_rows(p_k, o_r, o_r < rows, o_k, K, H * K, K == BK)
    b_row = tl.dot(b_g.to(b_k.dtype), b_k, acc=b_row, input_precision=PRECISION)
    if HAS_DECAY:
        if not EXACT:
            b_later = row_products(p_q, b_row, o_i, m_i, o_k, H * K, K)
        b_held = tl.zeros([BV, BK], tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
            b_s = tl.load(state_tile(states, i_slot, 0, o_v, o_k, 1, K, V), mask=m_s, other=0.0)
            b_d = tl.load(state_tile(d_states, i_slot, 0, o_v, o_k, 1, K, V), mask=m_s, other=0.0)
            b_held += b_s.to(tl.float32) * b_d.to(tl.float32)
        b_dg = sums_around(b_later, tl.zeros([BQ], tl.float32), o_i, PRECISION)
        b_dg += tl.load(chunk_decay + i_slot) * tl.sum(b_held)
        p_dg = d_log_decay + first * HV + i_h
        store_decay_gradients(p_dg, log_decay, b_dg, o_i, m_i, s_decay_t, HV)
    return b_y + b_row


@triton.jit
def key_gradients(
    b_y, p_q, p_k, norm_q, norm_k, v, log_decay, scalings, decays, states, errors, d_o, d_states,
    d_errors, d_v, d_beta, d_log_decay, first, tokens, i_h, i_slot, s_decay_t,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_DECAY: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one value head's part of dk to b_y; store dv, dbeta and its part of dlog_decay."""
    EXACT: tl.constexpr = PRECISION == "tf32x3"
    o_i, o_r, o_k = tl.arange(0, BQ), tl.arange(0, BT), tl.arange(0, BK)
    rows, m_i, m_r = tokens * N_STEPS, o_i < tokens, o_r < tokens * N_STEPS
    p_do, p_x = d_o + (first * HV + i_h) * V, d_errors + i_slot * BT * V
    WHOLE_V: tl.constexpr = V % BV == 0
    dtype = p_k.dtype.element_ty
    b_gp, b_gm = tl.zeros([BQ, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    b_row, b_col = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
    b_later = tl.zeros([BT], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
        b_do = load_rows(p_do, o_i, m_i, o_v, V, HV * V, WHOLE_V)
        b_e = load_errors(
            v, errors, first, rows, i_h, i_slot, o_r, o_v, HV, V, N_STEPS, BT, BV, TIED
        )
        b_gp = tl.dot(b_do, tl.trans(b_e), acc=b_gp, input_precision=PRECISION)
        if TIED:
            b_x = load_rows(p_x, o_r, o_r < BT, o_v, V, V, WHOLE_V)
            b_s = tl.load(state_tile(states, i_slot, 0, o_v, o_k, 1, K, V), mask=m_s, other=0.0)
            b_gm = tl.dot(b_x, tl.trans(b_e), acc=b_gm, input_precision=PRECISION)
            b_row = tl.dot(b_x, b_s, acc=b_row, input_precision=PRECISION)
    b_beta = row_scaling(scalings, i_slot, BETA, tl.full([BT], 1.0, tl.float32), o_r, BT, TIED)
    b_key = norm_k * b_beta
    m_pair = o_r[None, :] // N_STEPS <= o_i[:, None]
    b_gp = tl.where(m_pair, b_gp * norm_q[:, None] * b_key[None, :], 0.0)
    if HAS_DECAY:
        b_gp *= pair_decays(decays, i_slot, o_i, o_r, N_STEPS, BT)
    b_gp = b_gp.to(dtype)
    if TIED:
        b_dbeta = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_gm, 0.0), axis=1)
        tl.store(d_beta + (first * N_STEPS + o_r) * HV + i_h, b_dbeta, mask=m_r)
        m_before = o_r[:, None] > o_r[None, :]
        b_gm = tl.where(m_before, -b_gm * b_key[:, None] * b_key[None, :], 0.0)
        if HAS_DECAY:
            b_gm *= pair_decays(decays, i_slot, o_r, o_r, 1, BT)
        b_erase = row_scaling(scalings, i_slot, ERASE_ROW, norm_k, o_r, BT, HAS_DECAY)
        b_row *= -(b_erase * b_beta)[:, None]
        if HAS_DECAY and EXACT:
            b_later = row_products(p_k, b_row, o_r, m_r, o_k, H * K, K)
        b_k = load_rows(p_k, o_r, m_r, o_k, K, H * K, K == BK)
        b_gm = b_gm.to(dtype)
        b_row = tl.dot(b_gm, b_k, acc=b_row, input_precision=PRECISION)
        if HAS_DECAY and not EXACT:
            b_later = row_products(p_k, b_row, o_r, m_r, o_k, H * K, K)
        b_y += b_row
        b_col = tl.dot(tl.trans(b_gm), b_k, acc=b_col, input_precision=PRECISION)
    b_q = load_rows(p_q, o_i, m_i, o_k, K, H * K, K == BK)
    b_col = tl.dot(tl.trans(b_gp), b_q, acc=b_col, input_precision=PRECISION)
    if HAS_DECAY and not EXACT:
        b_later -= row_products(p_k, b_col, o_r, m_r, o_k, H * K, K)
    b_y += b_col
    b_col = tl.zeros([BT, BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_x = load_rows(p_x, o_r, o_r < BT, o_v, V, V, WHOLE_V)
        b_x = b_x.to(tl.float32) * b_beta[:, None]
        p_dv = d_v + (first * N_STEPS * HV + i_h) * V + o_r[:, None] * (HV * V) + o_v[None, :]
        tl.store(p_dv, b_x.to(dtype), mask=m_r[:, None] & (o_v < V)[None, :])
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
        b_e = load_errors(
            v, errors, first, rows, i_h, i_slot, o_r, o_v, HV, V, N_STEPS, BT, BV, TIED
        )
        b_d = tl.load(state_tile(d_states, i_slot, 0, o_v, o_k, 1, K, V), mask=m_s, other=0.0)
        b_col = tl.dot(b_e, b_d, acc=b_col, input_precision=PRECISION)
    b_write = row_scaling(scalings, i_slot, WRITE, norm_k, o_r, BT, HAS_DECAY)
    b_col *= (b_beta * b_write)[:, None]
    if HAS_DECAY:
        b_before = row_products(p_k, b_col, o_r, m_r, o_k, H * K, K)
        b_dg = sums_around(b_later, b_before, o_r, PRECISION)
        p_dg, m_t = d_log_decay + first * HV + i_h, m_r & (o_r % N_STEPS == 0)
        store_decay_gradients(p_dg, log_decay, b_dg, o_r // N_STEPS, m_t, s_decay_t, HV)
    return b_y + b_col


@triton.jit
def unit_norm_backward(b_x, b_norm, b_y):
    """dx = y - (x . y) x / |x|^2, where y = dx already divided by |x|."""
    b_x = b_x.to(tl.float32)
    return b_y - b_x * (tl.sum(b_x * b_y, axis=1) * b_norm * b_norm)[:, None]
