"""The gradients of a chunk of bfloat16 whose channels decay apart, where no block decays far.

The sums of channel_gradients_exact.py, without a free erase, by blocks of rows. Where
`anchored_gradients_kernel` ran before, only chunks that decay far as a whole are taken. Those in
which a block decays far go to `channel_gradients_kernel`.
"""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.channel_decay import (
    AFTER,
    BEFORE,
    BLOCK,
    EARLY,
    LATE,
    ROWS,
    TAILS,
    each_chunk,
    is_steep,
    load_sums,
)
from deltarule.ops.delta_rule.triton.channel_gradients_exact import (
    BOTH,
    row_products,
    unit_norm_backward,
)
from deltarule.ops.delta_rule.triton.tiles import inverse_norms, load_channels, load_rows

# Sums over the pairs of rows of a chunk whose channels decay apart, where no block decays far.
#
# Where no lead of a block of 16 rows falls far below 0, near_j = 2^-lead_j is a number like any
# other, and the decay between rows of a block is near_j 2^lead_i. What a block adds is counted from
# its start, and carried over whole blocks, of decay B_J, to where it goes:
#
#     rows       dx = S^T (..)    for J = 0..3: dx += sum_j in J G_ij near_j y_j,
#                                               of the rows in later blocks dx *= B_J
#                dx_i *= 2^lead_i
#     columns    dy = 0           for I = 3..0: of the columns in blocks up to I dy *= B_I (I < 3),
#                                               dy += sum_i in I G_ij 2^lead_i x_i
#                dy_j = near_j dy_j + decay(j, end] D^T (..)


@triton.jit
def split(b_x, low: tl.constexpr):
    """x as two numbers of a type: what two sums share must cancel to more digits than it has."""
    if low == tl.bfloat16:
        # The upper half of a float32 is a bfloat16.
        b_high = (b_x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    else:
        b_high = b_x.to(low).to(tl.float32)
    return b_high.to(low), (b_x - b_high).to(low)


@triton.jit
def product(b_g, b_x, b_low, b_sum, PRECISION: tl.constexpr):
    """b_sum + G (x + low); float32 leaves nothing below."""
    b_sum = tl.dot(b_g, b_x, acc=b_sum, input_precision=PRECISION)
    if PRECISION != "tf32x3":
        b_sum = tl.dot(b_g, b_low, acc=b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def block_decay(p_s, o_k, which: tl.constexpr, K: tl.constexpr):
    """The decay of all rows of a block, [1, BC], from where the sums have it."""
    late = LATE + 3 if which == 2 else AFTER + 2
    row = BEFORE + 1 if which == 0 else EARLY if which == 1 else late
    return tl.load(p_s + row * K + o_k, mask=o_k < K, other=0.0)[None, :]


@triton.jit
def to_end(p_s, b_all, o_r, o_k, K: tl.constexpr):
    """For each row the decay from its block's start to the chunk's end."""
    o_i, p_s, m_k = o_r[:, None], p_s + AFTER * K + o_k, o_k < K
    b_1 = tl.load(p_s, mask=m_k, other=0.0)[None, :]
    b_2 = tl.load(p_s + K, mask=m_k, other=0.0)[None, :]
    b_3 = tl.load(p_s + 2 * K, mask=m_k, other=0.0)[None, :]
    b_early = tl.where(o_i < BLOCK, b_all[None, :], b_1)
    return tl.where(o_i < 2 * BLOCK, b_early, tl.where(o_i < 3 * BLOCK, b_2, b_3))


@triton.jit
def norms(p_n, o_r, UNIT_NORM: tl.constexpr):
    """1 / |x| of the rows o_r as a column, from where the kernel left them; or 1."""
    b_norm = 1.0
    if UNIT_NORM:
        b_norm = tl.load(p_n + o_r)[:, None]
    return b_norm


@triton.jit
def row_gradients(
    p_k, p_p, p_s, p_n, b_dq, b_dx, rows, o_k, stride, K: tl.constexpr, BT: tl.constexpr,
    ERASE: tl.constexpr, UNIT_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx of the rows of q and of k, without the last factor: see the head of this page."""
    low: tl.constexpr = p_p.dtype.element_ty
    o_i, o_b = tl.arange(0, BT)[:, None], tl.arange(0, BLOCK)
    for J in tl.static_range(4):
        o_j = J * BLOCK + o_b
        b_k = load_channels(p_k, o_j, o_j < rows, o_k, stride, K) * norms(p_n + BT, o_j, UNIT_NORM)
        b_k, b_low = split(b_k * tl.exp2(-load_sums(p_s, o_j, o_k, K)), low)
        b_g = tl.load(p_p + o_i * BT + o_j[None, :])
        b_dq = product(b_g, b_k, b_low, b_dq, PRECISION)
        if ERASE == "tied":
            b_g = tl.load(p_p + BT * BT + o_i * BT + o_j[None, :])
            b_dx = product(b_g, b_k, b_low, b_dx, PRECISION)
        if J < 3:
            b_carry = tl.where(o_i >= (J + 1) * BLOCK, block_decay(p_s, o_k, J, K), 1.0)
            b_dq *= b_carry
            if ERASE == "tied":
                b_dx *= b_carry
    return b_dq, b_dx


@triton.jit
def column_gradients(
    p_q, p_k, p_p, p_s, p_n, rows, o_k, stride, K: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, N_STEPS: tl.constexpr, ERASE: tl.constexpr, UNIT_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dy of the columns k, without the factor near: see the head of this page."""
    low: tl.constexpr = p_p.dtype.element_ty
    o_j, o_b = tl.arange(0, BT), tl.arange(0, BLOCK)
    b_dy = tl.zeros([BT, BC], tl.float32)
    for up in tl.static_range(4):
        o_i = (3 - up) * BLOCK + o_b
        m_i = o_i < rows
        m_q = m_i & (o_i % N_STEPS == N_STEPS - 1)
        if up > 0:
            m_y = o_j[:, None] < (4 - up) * BLOCK
            b_dy *= tl.where(m_y, block_decay(p_s, o_k, 3 - up, K), 1.0)
        b_lead = tl.exp2(load_sums(p_s, o_i, o_k, K))
        b_q = load_channels(p_q, o_i // N_STEPS, m_q, o_k, stride, K)
        b_q, b_low = split(b_q * norms(p_n, o_i, UNIT_NORM) * b_lead, low)
        b_g = tl.load(p_p + o_i[:, None] * BT + o_j[None, :])
        b_dy = product(tl.trans(b_g), b_q, b_low, b_dy, PRECISION)
        if ERASE == "tied":
            b_k = load_channels(p_k, o_i, m_i, o_k, stride, K)
            b_k, b_low = split(b_k * norms(p_n + BT, o_i, UNIT_NORM) * b_lead, low)
            b_g = tl.load(p_p + BT * BT + o_i[:, None] * BT + o_j[None, :])
            b_dy = product(tl.trans(b_g), b_k, b_low, b_dy, PRECISION)
    return b_dy


@triton.jit
def suffix_sums(b_z):
    """For each row the sum of the rows from it on."""
    return tl.sum(b_z, axis=0)[None, :] - tl.cumsum(b_z, axis=0) + b_z


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
        b_k = load_channels(p_k, o_r, m_r, o_k, H * K, K) * norms(p_n + BT, o_r, UNIT_NORM)
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
        b_z = load_channels(p_q, o_t, m_q, o_k, H * K, K) * norms(p_n, o_r, UNIT_NORM) * b_dqh
        tl.debug_barrier()
        b_y = load_channels(p_k, o_r, m_r, o_k, H * K, K) * norms(p_n + BT, o_r, UNIT_NORM)
        b_z += b_y * (b_row - b_col)
        b_z = suffix_sums(b_z)
        b_z += tl.load(p_s + BOTH * K + o_k, mask=o_k < K, other=0.0)[None, :]
        p_d = d_log_decay + (first * HV + i_h) * K + o_t[:, None] * (HV * K) + o_k[None, :]
        tl.store(p_d, b_z, mask=(m_r & (o_r % N_STEPS == 0))[:, None] & m_k)
        b_dq += b_dqh
        b_dk += b_row + b_col
    b_q = load_channels(p_q, o_t, m_q, o_k, H * K, K) * norms(p_n, o_r, UNIT_NORM)
    b_k = load_channels(p_k, o_r, m_r, o_k, H * K, K) * norms(p_n + BT, o_r, UNIT_NORM)
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
