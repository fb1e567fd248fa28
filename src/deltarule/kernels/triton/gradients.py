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

A program takes BC channels of q and k of one chunk and one key head, and adds up the value heads in
order; what has no such channels, dbeta and (where the scan back leaves it to them) dv, the programs
of a chunk share. In 16 bits the pairs are summed as those of the rows from t on less those of the
columns from t on, q . GP k and k . GP^T q, in which the pairs within cancel to float32. For float32
that is too few digits: one more program sums the pairs across t alone. The scalings hold 1 / |x|
where `normalize_qk` asks for it; then dx <- dx - (x . dx) x / |x|^2, which takes all channels:
where a program has some of them, `unit_norm_gradients_kernel` does it afterwards.

In a loop with products of 16 bits, a tile is an operand of products and nothing else. One that is
also read into registers gets a single buffer from Triton (3.6 to 3.9), and the next tile overwrites
it while a product still reads it; one that was computed stays in registers, which the assembler of
Triton 3.6 overwrites likewise. So rows are scaled after the products, dv reads X again, and <D, S>
is the trace of D S^T (decay_gradients.py), of tiles of at least 64 rows: a product of fewer reads
them into registers.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.chunk import place_of, slab_chunk
from deltarule.kernels.triton.decay import decay_ratio
from deltarule.kernels.triton.decay_gradients import (
    KEYS,
    QUERIES,
    WRITES,
    pair_decay_gradients,
    store_held,
)
from deltarule.kernels.triton.gradient_values import (
    over_values,
    store_value_gradients,
    written_over_values,
)
from deltarule.kernels.triton.head_sums import load_chunk_sums
from deltarule.kernels.triton.row_sums import diagonal, operand_products
from deltarule.kernels.triton.tiles import (
    BETA,
    ERASE_ROW,
    READ,
    SCALINGS,
    WRITE,
    load_rows,
    row_scaling,
)
from deltarule.kernels.triton.unit_norm import inverse_norm, unit_norm_backward


@triton.jit(do_not_specialize=["T", "N", "s_slice", "per_segment", "slab", "per_slab"])
def gradients_kernel(
    q, k, v, cu_seqlens, scalings, chunk_decay, states, errors, d_o, d_states, d_errors, p_x,
    d_q, d_k, d_v, d_beta, parts, scale, T, N, s_slice,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    BV: tl.constexpr, HAS_DECAY: tl.constexpr, TIED: tl.constexpr, UNIT_NORM: tl.constexpr,
    PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    per_segment=None, SPLIT: tl.constexpr = "none", slab=None, per_slab=None,
    SLAB: tl.constexpr = "none", KEPT: tl.constexpr = True,
):  # fmt: skip
    """Gradients in the layouts of their tensors, d_beta in float32, and `parts` of dlog_decay.

    With TMA v, states, errors, d_o, d_states and d_errors are descriptors and every tile is full;
    p_x are the same d_errors as a pointer, for d_v. With a SLAB d_states, d_errors and the parts
    have the numbers of its chunks; states and errors, too, unless they are KEPT of all chunks.
    """
    SLICES: tl.constexpr = (K + BC - 1) // BC
    # The programs of a chunk run side by side, and share what they read in the cache.
    PAIRS: tl.constexpr = HAS_DECAY and PRECISION == "tf32x3"
    i_c, i_key, number = place_of(SLICES + PAIRS, H)
    first, tokens, i_m = slab_chunk(
        number, cu_seqlens, T, N, per_segment, slab, per_slab, CT, SPLIT, SLAB, PACKED
    )  # fmt: skip
    if tokens <= 0:
        return
    tokens = tl.minimum(tokens, CT)
    o_i, o_r, o_k = tl.arange(0, BQ), tl.arange(0, BT), i_c * BC + tl.arange(0, BC)
    m_i, m_r, m_k = o_i < tokens, o_r < tokens * N_STEPS, (o_k < K)[None, :]
    if i_c < SLICES:
        p_q, p_k = q + (first * H + i_key) * K, k + (first * N_STEPS * H + i_key) * K
        b_q = load_rows(p_q, o_i, m_i, o_k, K, H * K, K % BC == 0)
        b_k = load_rows(p_k, o_r, m_r, o_k, K, H * K, K % BC == 0)
        norm_q, norm_k = tl.full([BQ], 1.0, tl.float32), tl.full([BT], 1.0, tl.float32)
        if UNIT_NORM:
            # Of all channels, though the program takes BC of them.
            o_all = tl.arange(0, BK)
            norm_q = inverse_norm(load_rows(p_q, o_i, m_i, o_all, K, H * K, K == BK))
            norm_k = inverse_norm(load_rows(p_k, o_r, m_r, o_all, K, H * K, K == BK))
        b_dq, b_dk = tl.zeros([BQ, BC], tl.float32), tl.zeros([BT, BC], tl.float32)
        for i_g in range(HV // H):
            i_h = i_key * (HV // H) + i_g
            i_slot, i_own = i_m.to(tl.int64) * HV + i_h, number.to(tl.int64) * HV + i_h
            i_kept = i_slot if KEPT else i_own
            p_part = parts
            if HAS_DECAY:
                p_part += i_c * s_slice + i_own * 4 * BT
            b_dq, b_dk = add_value_head(
                b_dq, b_dk, b_q, b_k, norm_q * scale, norm_k, v, scalings, chunk_decay, states,
                errors, d_o, d_states, d_errors, p_x, d_v, d_beta, p_part, first, tokens, i_c, i_h,
                i_slot, i_kept, i_own,
                HV, K, V, N_STEPS, BT, BQ, BC, BV, HAS_DECAY, TIED, TMA, PRECISION, HV > H,
            )  # fmt: skip
        if UNIT_NORM and SLICES == 1:
            b_dq = unit_norm_backward(b_q, norm_q, b_dq)
            b_dk = unit_norm_backward(b_k, norm_k, b_dk)
        p_dq = d_q + (first * H + i_key) * K + o_i[:, None] * (H * K) + o_k[None, :]
        tl.store(p_dq, b_dq.to(d_q.dtype.element_ty), mask=m_i[:, None] & m_k)
        p_dk = d_k + (first * N_STEPS * H + i_key) * K + o_r[:, None] * (H * K) + o_k[None, :]
        tl.store(p_dk, b_dk.to(d_k.dtype.element_ty), mask=m_r[:, None] & m_k)
    elif PAIRS:
        for i_g in range(HV // H):
            i_h = i_key * (HV // H) + i_g
            i_slot, i_own = i_m.to(tl.int64) * HV + i_h, number.to(tl.int64) * HV + i_h
            i_kept = i_slot if KEPT else i_own
            pair_decay_gradients(
                q + (first * H + i_key) * K, k + (first * N_STEPS * H + i_key) * K, v,
                scalings, errors, d_o, d_errors, parts + SLICES * s_slice + i_own * 4 * BT, scale,
                first, tokens, i_h, i_slot, i_kept, i_own,
                H, HV, K, V, N_STEPS, BT, BQ, BK, BV, TIED, UNIT_NORM, PRECISION,
            )  # fmt: skip


@triton.jit
def add_value_head(
    b_dq, b_dk, b_q, b_k, norm_q, norm_k, v, scalings, chunk_decay, states, errors, d_o, d_states,
    d_errors, p_x, d_v, d_beta, p_part, first, tokens, i_c, i_h, i_slot, i_kept, i_own,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    HAS_DECAY: tl.constexpr, TIED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """dq and dk, ADDED to those of other value heads; its dbeta, dlog_decay and where
    there is room dv are stored.

    ADDED leaves fewer registers, and takes the values in two loops.
    """
    EXACT: tl.constexpr = PRECISION == "tf32x3"
    o_i, o_r, i_k = tl.arange(0, BQ), tl.arange(0, BT), i_c * BC
    rows, m_i, m_r = tokens * N_STEPS, o_i < tokens, o_r < tokens * N_STEPS
    dtype = b_k.dtype
    # Fetched before the loop, and looked at after it.
    b_beta = row_scaling(scalings, i_slot, BETA, tl.full([BT], 1.0, tl.float32), o_r, BT, TIED)
    b_reads = row_scaling(scalings, i_slot, READ, norm_q, o_i, BT, HAS_DECAY)
    b_erases = row_scaling(scalings, i_slot, ERASE_ROW, norm_k, o_r, BT, HAS_DECAY)
    b_writes = row_scaling(scalings, i_slot, WRITE, norm_k, o_r, BT, HAS_DECAY)
    if HAS_DECAY:
        b_chunk = tl.load(chunk_decay + i_slot)
    if d_v is not None:
        # While the registers are still free that the loop fills.
        store_value_gradients(
            p_x + i_own * BT * V, b_beta, d_v + (first * N_STEPS * HV + i_h) * V, rows, i_c,
            HV, V, BT, BV, (K + BC - 1) // BC,
        )  # fmt: skip
    b_gp, b_gm, b_read, b_row, b_col, b_held = over_values(
        v, states, errors, d_o, d_states, d_errors, first, rows, i_h, i_kept, i_own, o_i, m_i, i_k,
        HV, K, V, N_STEPS, BT, BQ, BC, BV, HAS_DECAY, TIED, TMA, PRECISION, not ADDED,
    )  # fmt: skip
    # What is done with is stored first: registers are what holds this kernel back.
    if HAS_DECAY:
        p_s = scalings + i_slot * SCALINGS * BT
        whole, rest, whole_q, rest_q = load_chunk_sums(p_s, o_r, o_i, N_STEPS, BT)
        if not ADDED:
            store_held(p_part, b_held, b_chunk, BT, PRECISION)
    if TIED:
        p_dbeta = d_beta + (first * N_STEPS + o_r) * HV + i_h
        tl.store(p_dbeta, diagonal(b_gm), mask=m_r & (i_c == 0))
    b_read *= b_reads[:, None]
    if not ADDED:
        b_col *= (b_writes * b_beta)[:, None]
    b_key = norm_k * b_beta
    b_factor = b_key[None, :]
    if HAS_DECAY:
        b_ratio = decay_ratio(whole_q[:, None], rest_q[:, None], whole[None, :], rest[None, :])
        b_factor *= b_ratio
    m_pair = o_r[None, :] // N_STEPS <= o_i[:, None]
    b_gp = tl.where(m_pair, b_gp * norm_q[:, None] * b_factor, 0.0)
    b_later_q, b_later_k = tl.zeros([BQ], tl.float32), tl.zeros([BT], tl.float32)
    if HAS_DECAY and EXACT:
        b_later_q = operand_products(b_q, b_read, PRECISION)
    b_gp = b_gp.to(dtype)
    b_read = tl.dot(b_gp, b_k, acc=b_read, input_precision=PRECISION)
    b_inner = tl.dot(tl.trans(b_gp), b_q, input_precision=PRECISION)
    if TIED:
        m_before = o_r[:, None] > o_r[None, :]
        if HAS_DECAY and N_STEPS > 1:
            b_ratio = decay_ratio(whole[:, None], rest[:, None], whole[None, :], rest[None, :])
            b_factor = b_key[None, :] * b_ratio
        b_gm = tl.where(m_before, b_gm * (-b_key)[:, None] * b_factor, 0.0)
        b_row *= -(b_erases * b_beta)[:, None]
        if HAS_DECAY and EXACT:
            b_later_k = operand_products(b_k, b_row, PRECISION)
        b_gm = b_gm.to(dtype)
        b_row = tl.dot(b_gm, b_k, acc=b_row, input_precision=PRECISION)
        b_inner = tl.dot(tl.trans(b_gm), b_k, acc=b_inner, input_precision=PRECISION)
    if HAS_DECAY:
        if not EXACT:
            b_later_q = operand_products(b_q, b_read, PRECISION)
            b_later_k = operand_products(b_k, b_row - b_inner, PRECISION)
        tl.store(p_part + QUERIES * BT + o_i, b_later_q)
        tl.store(p_part + KEYS * BT + o_r, b_later_k)
    b_row += b_inner
    if ADDED:
        b_read, b_row = b_dq + b_read, b_dk + b_row
        b_col, b_held = written_over_values(
            b_col, b_held, v, states, errors, d_states, first, rows, i_h, i_kept, i_own, i_k,
            HV, K, V, N_STEPS, BT, BC, BV, HAS_DECAY, TIED, TMA, PRECISION,
        )  # fmt: skip
        b_col *= (b_writes * b_beta)[:, None]
        if HAS_DECAY:
            store_held(p_part, b_held, b_chunk, BT, PRECISION)
    if HAS_DECAY:
        tl.store(p_part + WRITES * BT + o_r, operand_products(b_k, b_col, PRECISION))
    return b_read, b_col + b_row
