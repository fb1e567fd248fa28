"""The gradients of a chunk of bfloat16 whose channels decay apart, where no block decays far.

The sums of channel_gradients.py, without a free erase, as channel_blocks.py takes them. Where
`anchored_gradients_kernel` ran before, only chunks that decay far as a whole are taken. Those in
which a block decays far go to `channel_gradients_kernel`.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_blocks import (
    column_gradients,
    norms,
    row_gradients,
    suffix_sums,
    to_end,
)
from deltarule.kernels.triton.channel_decay import BLOCK, ROWS, TAILS, load_sums
from deltarule.kernels.triton.channel_decay_gradients import BOTH
from deltarule.kernels.triton.channel_far import each_chunk, is_steep
from deltarule.kernels.triton.channel_gradients import (
    row_products,
    unit_norm_backward,
)
from deltarule.kernels.triton.channel_tiles import inverse_norms, load_tile
from deltarule.kernels.triton.tiles import load_rows


@triton.jit
def state_rows(
    d_o, d_errors, states, i_slot, first, i_h, o_r, m_r, o_k,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S^T dO and S^T X of the channels o_k."""
    m_q = m_r & (o_r % N_STEPS == N_STEPS - 1)
    WHOLE: tl.constexpr = V % BV == 0
    p_do, p_x = d_o + (first * HV + i_h) * V, d_errors + i_slot * BT * V
    b_q, b_x = tl.zeros([BT, BC], tl.float32), tl.zeros([BT, BC], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_s = load_rows(states + i_slot * V * K, o_v, o_v < V, o_k, K, K, K % BC == 0)
        b_do = load_rows(p_do, o_r // N_STEPS, m_q, o_v, V, HV * V, WHOLE)
        b_q = tl.dot(b_do, b_s, acc=b_q, input_precision=PRECISION)
        if ERASE == "tied":
            b_row = load_rows(p_x, o_r, o_r < BT, o_v, V, V, WHOLE)
            b_x = tl.dot(b_row, b_s, acc=b_x, input_precision=PRECISION)
    return b_q, b_x


@triton.jit
def state_columns(
    v, errors, states, d_states, i_slot, first, i_h, o_r, m_r, o_k,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D^T E (none: D^T v) of the channels o_k, and the sum over v of D S."""
    WHOLE: tl.constexpr = V % BV == 0
    b_y, b_both = tl.zeros([BT, BC], tl.float32), tl.zeros([BV, BC], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_s = load_rows(states + i_slot * V * K, o_v, o_v < V, o_k, K, K, K % BC == 0)
        b_d = load_rows(d_states + i_slot * V * K, o_v, o_v < V, o_k, K, K, K % BC == 0)
        b_both += b_s.to(tl.float32) * b_d.to(tl.float32)
        if ERASE == "tied":
            b_row = load_rows(errors + i_slot * BT * V, o_r, o_r < BT, o_v, V, V, WHOLE)
        else:
            p_v = v + (first * N_STEPS * HV + i_h) * V
            b_row = load_rows(p_v, o_r, m_r, o_v, V, HV * V, WHOLE)
        b_y = tl.dot(b_row, b_d, acc=b_y, input_precision=PRECISION)
    return b_y, tl.sum(b_both, axis=0)


@triton.jit
def channel_tile(
    q, k, v, beta, sums, states, errors, d_o, d_states, d_errors, pairs, chunk_decay,
    d_q, d_k, d_log_decay, p_n, i_m, i_key, i_k, first, rows,
    scale, T, s_beta_b, s_beta_t, s_beta_h,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, ERASE: tl.constexpr,
    UNIT_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients by the channels from i_k on; returns x . dx of every row of q and k."""
    COUNT: tl.constexpr = 2 if ERASE == "tied" else 1
    i_b, i_t = first // T, first % T
    o_r, o_k = tl.arange(0, BT), i_k + tl.arange(0, BC)
    m_r, m_k = o_r < rows, (o_k < K)[None, :]
    o_t, m_q = o_r // N_STEPS, m_r & (o_r % N_STEPS == N_STEPS - 1)
    p_q, p_k = q + (first * H + i_key) * K, k + (first * N_STEPS * H + i_key) * K
    b_dq, b_dk = tl.zeros([BT, BC], tl.float32), tl.zeros([BT, BC], tl.float32)
    for i_g in range(HV // H):
        i_h = i_key * (HV // H) + i_g
        i_slot = i_m.to(tl.int64) * HV + i_h
        p_p, p_s = pairs + i_slot * COUNT * BT * BT, sums + i_slot * ROWS * K
        b_beta = 1.0
        if ERASE == "tied":
            p_beta = beta + i_b * s_beta_b + i_t * N_STEPS * s_beta_t + i_h * s_beta_h
            b_beta = tl.load(p_beta + o_r * s_beta_t, mask=m_r, other=0.0).to(tl.float32)[:, None]
        b_col, b_end = state_columns(
            v, errors, states, d_states, i_slot, first, i_h, o_r, m_r, o_k,
            HV, K, V, N_STEPS, BT, BV, BC, ERASE, PRECISION,
        )  # fmt: skip
        # Every decay of the chunk takes part in what reaches its end.
        b_all = tl.load(chunk_decay + i_slot * K + o_k, mask=o_k < K, other=0.0)
        b_col *= b_beta * to_end(p_s, b_all, o_r, o_k, K)
        b_k = load_tile(p_k, o_r, m_r, o_k, H * K, K) * norms(p_n + BT, o_r, UNIT_NORM)
        b_near = tl.exp2(-load_sums(p_s, o_r, o_k, K))
        b_end = b_end * b_all + tl.sum(b_k * b_near * b_col, axis=0)
        tl.store(p_s + BOTH * K + o_k, b_end, mask=o_k < K)
        # What a phase loads is loaded again in the next: it must not stay in registers.
        tl.debug_barrier()
        b_col += column_gradients(
            p_q, p_k, p_p, p_s, p_n, rows, o_k, H * K,
            K, BT, BC, N_STEPS, ERASE, UNIT_NORM, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        b_col *= tl.exp2(-load_sums(p_s, o_r, o_k, K))
        b_dqh, b_row = state_rows(
            d_o, d_errors, states, i_slot, first, i_h, o_r, m_r, o_k,
            HV, K, V, N_STEPS, BT, BV, BC, ERASE, PRECISION,
        )  # fmt: skip
        if ERASE == "tied":
            b_row *= -b_beta
        tl.debug_barrier()
        b_dqh, b_row = row_gradients(
            p_k, p_p, p_s, p_n, b_dqh * scale, b_row, rows, o_k, H * K,
            K, BT, ERASE, UNIT_NORM, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        b_lead = tl.exp2(load_sums(p_s, o_r, o_k, K))
        b_dqh *= b_lead
        if ERASE == "tied":
            b_row *= b_lead
        b_z = load_tile(p_q, o_t, m_q, o_k, H * K, K) * norms(p_n, o_r, UNIT_NORM) * b_dqh
        tl.debug_barrier()
        b_y = load_tile(p_k, o_r, m_r, o_k, H * K, K) * norms(p_n + BT, o_r, UNIT_NORM)
        b_z += b_y * (b_row - b_col)
        b_z = suffix_sums(b_z)
        b_z += tl.load(p_s + BOTH * K + o_k, mask=o_k < K, other=0.0)[None, :]
        p_d = d_log_decay + (first * HV + i_h) * K + o_t[:, None] * (HV * K) + o_k[None, :]
        tl.store(p_d, b_z, mask=(m_r & (o_r % N_STEPS == 0))[:, None] & m_k)
        b_dq += b_dqh
        b_dk += b_row + b_col
    b_q = load_tile(p_q, o_t, m_q, o_k, H * K, K) * norms(p_n, o_r, UNIT_NORM)
    b_k = load_tile(p_k, o_r, m_r, o_k, H * K, K) * norms(p_n + BT, o_r, UNIT_NORM)
    p_d = d_q + (first * H + i_key) * K + o_t[:, None] * (H * K) + o_k[None, :]
    tl.store(p_d, b_dq.to(d_q.dtype.element_ty), mask=m_q[:, None] & m_k)
    p_d = d_k + (first * N_STEPS * H + i_key) * K + o_r[:, None] * (H * K) + o_k[None, :]
    tl.store(p_d, b_dk.to(d_k.dtype.element_ty), mask=m_r[:, None] & m_k)
    return row_products(b_q, b_dq, UNIT_NORM), row_products(b_k, b_dk, UNIT_NORM)


@triton.jit
def even_chunk(
    i_m, i_key, first, rows, q, k, v, beta, states, errors, d_o, d_states, d_errors, pairs, sums,
    chunk_decay, d_q, d_k, d_log_decay, scale, T, s_beta_b, s_beta_t, s_beta_h,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, ERASE: tl.constexpr,
    UNIT_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `even_chunks_kernel` does with one chunk of one key head."""
    if not is_steep(sums, i_m, i_key, H, HV, K):
        tl.static_assert(BT == 4 * BLOCK)
        o_r = tl.arange(0, BT)
        m_r = o_r < rows
        o_t, m_q = o_r // N_STEPS, m_r & (o_r % N_STEPS == N_STEPS - 1)
        row_q, row_k = (first * H + i_key) * K, (first * N_STEPS * H + i_key) * K
        # Rows of the sums that only float32 has hold the norms: they would be too many registers.
        p_n = sums + (i_m.to(tl.int64) * HV + i_key * (HV // H)) * ROWS * K + TAILS * K
        if UNIT_NORM:
            tl.store(p_n + o_r, inverse_norms(q + row_q, o_t, m_q, H * K, K, BC, True))
            tl.store(p_n + BT + o_r, inverse_norms(k + row_k, o_r, m_r, H * K, K, BC, True))
            tl.debug_barrier()
        if not UNIT_NORM:
            channel_tile(
                q, k, v, beta, sums, states, errors, d_o, d_states, d_errors, pairs, chunk_decay,
                d_q, d_k, d_log_decay, p_n, i_m, i_key, tl.program_id(2) * BC, first, rows,
                scale, T, s_beta_b, s_beta_t, s_beta_h,
                H, HV, K, V, N_STEPS, BT, BV, BC, ERASE, UNIT_NORM, PRECISION,
            )  # fmt: skip
        else:
            dot_q, dot_k = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
            for i_k in tl.range(0, K, BC, disable_licm=True):
                dot_qk = channel_tile(
                    q, k, v, beta, sums, states, errors, d_o, d_states, d_errors, pairs,
                    chunk_decay, d_q, d_k, d_log_decay, p_n, i_m, i_key, i_k, first, rows,
                    scale, T, s_beta_b, s_beta_t, s_beta_h,
                    H, HV, K, V, N_STEPS, BT, BV, BC, ERASE, UNIT_NORM, PRECISION,
                )  # fmt: skip
                dot_q += dot_qk[0]
                dot_k += dot_qk[1]
            tl.debug_barrier()
            for i_k in range(0, K, BC):
                o_k = i_k + tl.arange(0, BC)
                norm_q, norm_k = norms(p_n, o_r, True), norms(p_n + BT, o_r, True)
                unit_norm_backward(q + row_q, d_q + row_q, norm_q, dot_q, o_t, m_q, o_k, H * K, K)
                unit_norm_backward(k + row_k, d_k + row_k, norm_k, dot_k, o_r, m_r, o_k, H * K, K)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def even_chunks_kernel(
    q, k, v, beta, cu_seqlens, states, errors, d_o, d_states, d_errors, pairs, sums, chunk_decay,
    d_q, d_k, d_log_decay, chunks, scale, T, N, s_beta_b, s_beta_t, s_beta_h,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, ERASE: tl.constexpr,
    UNIT_NORM: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    FAR_ALONE: tl.constexpr,
):  # fmt: skip
    """Gradients of the chunks that are not steep, as `channel_gradients_kernel` leaves them.

    A program takes BC channels; of unit norms, which need all of them, one tile after the other.
    """
    each_chunk(
        even_chunk,
        (
            q, k, v, beta, states, errors, d_o, d_states, d_errors, pairs, sums, chunk_decay,
            d_q, d_k, d_log_decay, scale, T, s_beta_b, s_beta_t, s_beta_h,
            H, HV, K, V, N_STEPS, BT, BV, BC, ERASE, UNIT_NORM, PRECISION,
        ),
        chunk_decay if FAR_ALONE else None, cu_seqlens, chunks, T, N,
        H, H, HV, K, N_STEPS, CT, PACKED,
    )  # fmt: skip
