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
    Left,
    row_products,
    unit_norm_backward,
)
from deltarule.ops.delta_rule.triton.channel_scores_exact import Keys
from deltarule.ops.delta_rule.triton.gradients import Around
from deltarule.ops.delta_rule.triton.tiles import (
    Gates,
    Sizes,
    inverse_norms,
    load_beta,
    load_channels,
    load_rows,
)

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
def row_gradients(p_k, p_p, p_s, p_n, b_dq, b_dx, rows, o_k, S: tl.constexpr):
    """dx of the rows of q and of k, without the last factor: see the head of this page."""
    low: tl.constexpr = p_p.dtype.element_ty
    o_i, o_b = tl.arange(0, S.BT)[:, None], tl.arange(0, BLOCK)
    for J in tl.static_range(4):
        o_j = J * BLOCK + o_b
        b_k = load_channels(p_k, o_j, o_j < rows, o_k, S.H * S.K, S.K) * norms(
            p_n + S.BT, o_j, S.UNIT_NORM
        )
        b_k, b_low = split(b_k * tl.exp2(-load_sums(p_s, o_j, o_k, S.K)), low)
        b_g = tl.load(p_p + o_i * S.BT + o_j[None, :])
        b_dq = product(b_g, b_k, b_low, b_dq, S.PRECISION)
        if S.ERASE == "tied":
            b_g = tl.load(p_p + S.BT * S.BT + o_i * S.BT + o_j[None, :])
            b_dx = product(b_g, b_k, b_low, b_dx, S.PRECISION)
        if J < 3:
            b_carry = tl.where(o_i >= (J + 1) * BLOCK, block_decay(p_s, o_k, J, S.K), 1.0)
            b_dq *= b_carry
            if S.ERASE == "tied":
                b_dx *= b_carry
    return b_dq, b_dx


@triton.jit
def column_gradients(p_q, p_k, p_p, p_s, p_n, rows, o_k, S: tl.constexpr):
    """dy of the columns k, without the factor near: see the head of this page."""
    low: tl.constexpr = p_p.dtype.element_ty
    o_j, o_b = tl.arange(0, S.BT), tl.arange(0, BLOCK)
    b_dy = tl.zeros([S.BT, S.BC], tl.float32)
    for up in tl.static_range(4):
        o_i = (3 - up) * BLOCK + o_b
        m_i = o_i < rows
        m_q = m_i & (o_i % S.N_STEPS == S.N_STEPS - 1)
        if up > 0:
            m_y = o_j[:, None] < (4 - up) * BLOCK
            b_dy *= tl.where(m_y, block_decay(p_s, o_k, 3 - up, S.K), 1.0)
        b_lead = tl.exp2(load_sums(p_s, o_i, o_k, S.K))
        b_q = load_channels(p_q, o_i // S.N_STEPS, m_q, o_k, S.H * S.K, S.K)
        b_q, b_low = split(b_q * norms(p_n, o_i, S.UNIT_NORM) * b_lead, low)
        b_g = tl.load(p_p + o_i[:, None] * S.BT + o_j[None, :])
        b_dy = product(tl.trans(b_g), b_q, b_low, b_dy, S.PRECISION)
        if S.ERASE == "tied":
            b_k = load_channels(p_k, o_i, m_i, o_k, S.H * S.K, S.K)
            b_k, b_low = split(b_k * norms(p_n + S.BT, o_i, S.UNIT_NORM) * b_lead, low)
            b_g = tl.load(p_p + S.BT * S.BT + o_i[:, None] * S.BT + o_j[None, :])
            b_dy = product(tl.trans(b_g), b_k, b_low, b_dy, S.PRECISION)
    return b_dy


@triton.jit
def suffix_sums(b_z):
    """For each row the sum of the rows from it on."""
    return tl.sum(b_z, axis=0)[None, :] - tl.cumsum(b_z, axis=0) + b_z


@triton.jit
def state_rows(x, i_slot, first, i_h, o_r, m_r, o_k, S: tl.constexpr):
    """S^T dO and S^T X of the channels o_k."""
    m_q = m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    WHOLE: tl.constexpr = S.V % S.BV == 0
    p_do, p_x = x.d_o + (first * S.HV + i_h) * S.V, x.d_errors + i_slot * S.BT * S.V
    b_q, b_x = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_s = load_rows(
            x.states + i_slot * S.V * S.K, o_v, o_v < S.V, o_k, S.K, S.K, S.K % S.BC == 0
        )
        b_do = load_rows(p_do, o_r // S.N_STEPS, m_q, o_v, S.V, S.HV * S.V, WHOLE)
        b_q = tl.dot(b_do, b_s, acc=b_q, input_precision=S.PRECISION)
        if S.ERASE == "tied":
            b_row = load_rows(p_x, o_r, o_r < S.BT, o_v, S.V, S.V, WHOLE)
            b_x = tl.dot(b_row, b_s, acc=b_x, input_precision=S.PRECISION)
    return b_q, b_x


@triton.jit
def state_columns(x, i_slot, first, i_h, o_r, m_r, o_k, S: tl.constexpr):
    """D^T E (none: D^T v) of the channels o_k, and the sum over v of D S."""
    WHOLE: tl.constexpr = S.V % S.BV == 0
    b_y, b_both = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BV, S.BC], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_s = load_rows(
            x.states + i_slot * S.V * S.K, o_v, o_v < S.V, o_k, S.K, S.K, S.K % S.BC == 0
        )
        b_d = load_rows(
            x.d_states + i_slot * S.V * S.K, o_v, o_v < S.V, o_k, S.K, S.K, S.K % S.BC == 0
        )
        b_both += b_s.to(tl.float32) * b_d.to(tl.float32)
        if S.ERASE == "tied":
            b_row = load_rows(x.errors + i_slot * S.BT * S.V, o_r, o_r < S.BT, o_v, S.V, S.V, WHOLE)
        else:
            p_v = x.v + (first * S.N_STEPS * S.HV + i_h) * S.V
            b_row = load_rows(p_v, o_r, m_r, o_v, S.V, S.HV * S.V, WHOLE)
        b_y = tl.dot(b_row, b_d, acc=b_y, input_precision=S.PRECISION)
    return b_y, tl.sum(b_both, axis=0)


@triton.jit
def channel_tile(i, x, y, g, p_n, i_m, i_key, i_k, first, rows, S: tl.constexpr):
    """Gradients by the channels from i_k on; returns x . dx of every row of q and k."""
    COUNT: tl.constexpr = 2 if S.ERASE == "tied" else 1
    o_r, o_k = tl.arange(0, S.BT), i_k + tl.arange(0, S.BC)
    m_r, m_k = o_r < rows, (o_k < S.K)[None, :]
    o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    p_q, p_k = i.q + (first * S.H + i_key) * S.K, i.k + (first * S.N_STEPS * S.H + i_key) * S.K
    b_dq, b_dk = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    for i_g in range(S.HV // S.H):
        i_h = i_key * (S.HV // S.H) + i_g
        i_slot = i_m.to(tl.int64) * S.HV + i_h
        p_p, p_s = y.pairs + i_slot * COUNT * S.BT * S.BT, y.sums + i_slot * ROWS * S.K
        b_beta = 1.0
        if S.ERASE == "tied":
            b_beta = load_beta(g, first, i_h, o_r, m_r, S)[:, None]
        b_col, b_end = state_columns(x, i_slot, first, i_h, o_r, m_r, o_k, S)
        # Every decay of the chunk takes part in what reaches its end.
        b_all = tl.load(y.chunk_decay + i_slot * S.K + o_k, mask=o_k < S.K, other=0.0)
        b_col *= b_beta * to_end(p_s, b_all, o_r, o_k, S.K)
        b_k = load_channels(p_k, o_r, m_r, o_k, S.H * S.K, S.K) * norms(
            p_n + S.BT, o_r, S.UNIT_NORM
        )
        b_near = tl.exp2(-load_sums(p_s, o_r, o_k, S.K))
        b_end = b_end * b_all + tl.sum(b_k * b_near * b_col, axis=0)
        tl.store(p_s + BOTH * S.K + o_k, b_end, mask=o_k < S.K)
        # What a phase loads is loaded again in the next: it must not stay in registers.
        tl.debug_barrier()
        b_col += column_gradients(p_q, p_k, p_p, p_s, p_n, rows, o_k, S)
        tl.debug_barrier()
        b_col *= tl.exp2(-load_sums(p_s, o_r, o_k, S.K))
        b_dqh, b_row = state_rows(x, i_slot, first, i_h, o_r, m_r, o_k, S)
        if S.ERASE == "tied":
            b_row *= -b_beta
        tl.debug_barrier()
        b_dqh, b_row = row_gradients(p_k, p_p, p_s, p_n, b_dqh * y.scale, b_row, rows, o_k, S)
        tl.debug_barrier()
        b_lead = tl.exp2(load_sums(p_s, o_r, o_k, S.K))
        b_dqh *= b_lead
        if S.ERASE == "tied":
            b_row *= b_lead
        b_z = (
            load_channels(p_q, o_t, m_q, o_k, S.H * S.K, S.K) * norms(p_n, o_r, S.UNIT_NORM) * b_dqh
        )
        tl.debug_barrier()
        b_y = load_channels(p_k, o_r, m_r, o_k, S.H * S.K, S.K) * norms(
            p_n + S.BT, o_r, S.UNIT_NORM
        )
        b_z += b_y * (b_row - b_col)
        b_z = suffix_sums(b_z)
        b_z += tl.load(p_s + BOTH * S.K + o_k, mask=o_k < S.K, other=0.0)[None, :]
        p_d = (
            y.d_log_decay + (first * S.HV + i_h) * S.K + o_t[:, None] * (S.HV * S.K) + o_k[None, :]
        )
        tl.store(p_d, b_z, mask=(m_r & (o_r % S.N_STEPS == 0))[:, None] & m_k)
        b_dq += b_dqh
        b_dk += b_row + b_col
    b_q = load_channels(p_q, o_t, m_q, o_k, S.H * S.K, S.K) * norms(p_n, o_r, S.UNIT_NORM)
    b_k = load_channels(p_k, o_r, m_r, o_k, S.H * S.K, S.K) * norms(p_n + S.BT, o_r, S.UNIT_NORM)
    p_d = y.d_q + (first * S.H + i_key) * S.K + o_t[:, None] * (S.H * S.K) + o_k[None, :]
    tl.store(p_d, b_dq.to(y.d_q.dtype.element_ty), mask=m_q[:, None] & m_k)
    p_d = (
        y.d_k + (first * S.N_STEPS * S.H + i_key) * S.K + o_r[:, None] * (S.H * S.K) + o_k[None, :]
    )
    tl.store(p_d, b_dk.to(y.d_k.dtype.element_ty), mask=m_r[:, None] & m_k)
    return row_products(b_q, b_dq, S.UNIT_NORM), row_products(b_k, b_dk, S.UNIT_NORM)


@triton.jit
def even_chunk(i_m, i_key, first, rows, i, x, y, g, S: tl.constexpr):
    """What `even_chunks_kernel` does with one chunk of one key head."""
    if not is_steep(y.sums, i_m, i_key, S.H, S.HV, S.K):
        tl.static_assert(S.BT == 4 * BLOCK)
        o_r = tl.arange(0, S.BT)
        m_r = o_r < rows
        o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
        row_q, row_k = (first * S.H + i_key) * S.K, (first * S.N_STEPS * S.H + i_key) * S.K
        # Rows of the sums that only float32 has hold the norms: they would be too many registers.
        p_n = y.sums + (i_m.to(tl.int64) * S.HV + i_key * (S.HV // S.H)) * ROWS * S.K + TAILS * S.K
        if S.UNIT_NORM:
            tl.store(p_n + o_r, inverse_norms(i.q + row_q, o_t, m_q, S.H * S.K, S.K, S.BC, True))
            tl.store(
                p_n + S.BT + o_r, inverse_norms(i.k + row_k, o_r, m_r, S.H * S.K, S.K, S.BC, True)
            )
            tl.debug_barrier()
        if not S.UNIT_NORM:
            i_k = tl.program_id(2) * S.BC
            channel_tile(i, x, y, g, p_n, i_m, i_key, i_k, first, rows, S)
        else:
            dot_q, dot_k = tl.zeros([S.BT], tl.float32), tl.zeros([S.BT], tl.float32)
            for i_k in tl.range(0, S.K, S.BC, disable_licm=True):
                dot_qk = channel_tile(i, x, y, g, p_n, i_m, i_key, i_k, first, rows, S)
                dot_q += dot_qk[0]
                dot_k += dot_qk[1]
            tl.debug_barrier()
            for i_k in range(0, S.K, S.BC):
                o_k = i_k + tl.arange(0, S.BC)
                norm_q, norm_k = norms(p_n, o_r, True), norms(p_n + S.BT, o_r, True)
                unit_norm_backward(
                    i.q + row_q, y.d_q + row_q, norm_q, dot_q, o_t, m_q, o_k, S.H * S.K, S.K
                )
                unit_norm_backward(
                    i.k + row_k, y.d_k + row_k, norm_k, dot_k, o_r, m_r, o_k, S.H * S.K, S.K
                )


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
    S: tl.constexpr = Sizes(
        H=H, HV=HV, K=K, V=V, N_STEPS=N_STEPS, CT=CT, BT=BT, BV=BV, BC=BC, ERASE=ERASE,
        UNIT_NORM=UNIT_NORM, PRECISION=PRECISION,
    )  # fmt: skip
    g = Gates(beta, None, T, s_beta_b, s_beta_t, s_beta_h, None, None, None, None)
    x = Around(v, states, errors, d_o, d_states, d_errors)
    y = Left(pairs, sums, chunk_decay, d_q, d_k, None, None, d_log_decay, scale)
    each_chunk(
        even_chunk, (Keys(q, k, None, None), x, y, g, S), chunk_decay if FAR_ALONE else None,
        cu_seqlens, chunks, T, N, H, S, PACKED,
    )  # fmt: skip
