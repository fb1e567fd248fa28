"""The gradients of a chunk with a decay per channel, fast: all decays from the chunk's start.

With c_i the sum of base-2 log decays from the chunk's start to row i, plus SHIFT, decay(j, i] is
2^c_i 2^-c_j as in channel_scores_fast.py, and every sum over pairs is one product of rounded rows:

    x_i = q_i 2^c_i      u_i = k_i 2^c_i      y_j = k_j 2^-c_j
    GP_ij = scale dO_i . w_j      GM_ij = -beta_i X_i . w_j      w = beta E    (names: gradients.py)

    read = 2^-SHIFT scale S^T dO + GP y          dq = 2^c read
    row  = -2^-SHIFT beta S^T X + GM y           dk = 2^c row + 2^-c col
    end  = 2^c_end D^T w                         col = end + GP^T x + GM^T u

The decay of a row reaches all pairs around it, and the states around the chunk:

    z = x read + u row - y col
    dlog_decay_t = sum_{i >= t} z_i + sum_j y_j end_j + decay[0, end] sum_v D S

Pairs within the rows from t on are in z twice, and cancel: they are products of the same rounded
numbers on both sides. Sums over rows are products with a triangle of ones, of numbers in two parts.

The gradients of a flagged chunk are to be written again: see channel_flagged.py.
A program takes BC channels of one chunk and one key head, and adds up the value heads in order.
In a loop with products, a tile is an operand of products and nothing else: see gradients.py.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton import tiles
from deltarule.ops.delta_rule.triton.tiles import LOG2_E
from deltarule.ops.runtime.places import chunk_place, place_of

# Queries, keys and gates of all rows, a triangle of ones, and where gradients go.
Rows = namedtuple("Rows", "ones q k log_decay d_q d_v d_beta d_log_decay scale")


@triton.jit
def rounded(b_x, low: tl.constexpr):
    """x with the digits of a type, in float32."""
    if low == tl.bfloat16:
        # The upper half of a float32 is a bfloat16. A cast there and back takes each number alone.
        bits = (b_x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
        b_x = bits.to(tl.float32, bitcast=True)
    return b_x


@triton.jit
def sum_rows(b_m, b_x, low: tl.constexpr, PRECISION: tl.constexpr):
    """m x, where m holds zeros and ones; x in two parts of a type with fewer digits."""
    if low == tl.bfloat16:
        b_high = (b_x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        b_sum = tl.dot(b_m, b_high.to(low))
        b_sum = tl.dot(b_m, (b_x - b_high).to(low), acc=b_sum)
    else:
        b_sum = tl.dot(b_m, b_x, input_precision=PRECISION)
    return b_sum


@triton.jit
def store_tile(
    x, row, i_h, column, o_r, m_r, o_c, b_x, HEADS: tl.constexpr, C: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        x.store([row.to(tl.int32), i_h * C + column], b_x.to(x.dtype))
    else:
        tiles.store_rows(x + (row * HEADS + i_h) * C, b_x, o_r, m_r, o_c, C, HEADS * C)


@triton.jit
def store_value_gradients(d_v, d_errors, b_beta, i_c, at, o_r, m_r, S: tl.constexpr):
    """dv = beta X of every SLICES-th tile of values."""
    SLICES: tl.constexpr = (S.K + S.BC - 1) // S.BC
    row = at.first * S.N_STEPS
    for i_v in tl.range(i_c * S.BV, S.V, SLICES * S.BV, num_stages=1):
        o_v = i_v + tl.arange(0, S.BV)
        b_x = tiles.load_chunk(d_errors, at.slot, i_v, S.V, S.BT, S.BV, S.TMA)
        b_x = b_x.to(tl.float32) * b_beta[:, None]
        store_tile(d_v, row, at.head, i_v, o_r, m_r, o_v, b_x, S.HV, S.V, S.TMA)


@triton.jit
def add_value_head(
    b_dq, b_dk, norm_q, norm_k, x, y, at, p_beta, s_beta_t, i_c, i_key, S: tl.constexpr
):
    """dq and dk with one value head's part; its dv, dbeta and dlog_decay are stored."""
    low: tl.constexpr = y.q.dtype if S.TMA else y.q.dtype.element_ty
    i_k, o_r = i_c * S.BC, tl.arange(0, S.BT)
    o_k, m_r = i_k + tl.arange(0, S.BC), o_r < at.rows
    o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    m_g = m_r & (o_r % S.N_STEPS == 0)
    b_beta = tl.full([S.BT], 1.0, tl.float32)
    if S.TIED:
        b_beta = tl.load(p_beta + o_r * s_beta_t, mask=m_r, other=0.0).to(tl.float32)
    b_gp, b_gm, b_read, b_row, _, _ = tiles.over_values(x, at, o_t, m_q, i_k, S, False)
    b_read *= 2.0**-S.SHIFT
    b_row *= 2.0**-S.SHIFT
    b_gp = tl.where(o_r[:, None] >= o_r[None, :], b_gp, 0.0).to(low)
    # Here, so that it need not stay in registers until it is used.
    b_turned = tl.trans(b_gp)
    if S.TIED:
        p_dbeta = y.d_beta + (at.first * S.N_STEPS + o_r) * S.HV + at.head
        tl.store(p_dbeta, tiles.diagonal(b_gm), mask=m_r & (i_c == 0))
        b_gm = tl.where(o_r[:, None] > o_r[None, :], b_gm, 0.0).to(low)
        b_turned2 = tl.trans(b_gm)
    b_g = tiles.load_tile(y.log_decay, at.first, at.head, i_k, o_t, m_g, o_k, S.HV, S.K, S)
    b_ones = tiles.load_chunk(y.ones, i_c * 0, 0, S.BT, S.BT, S.BT, S.TMA)
    b_c = sum_rows(b_ones, b_g.to(tl.float32) * LOG2_E, low, S.PRECISION) + S.SHIFT
    # Sums never grow: that of all rows is the least.
    b_all = tl.exp2(tl.min(b_c, axis=0))
    b_lead, b_near = tl.exp2(b_c), tl.exp2(-b_c)
    b_k = tiles.load_tile(y.k, at.first * S.N_STEPS, i_key, i_k, o_r, m_r, o_k, S.H, S.K, S)
    b_k = b_k.to(tl.float32) * (norm_k * b_beta)[:, None]
    b_y = rounded(b_k * b_near, low)
    b_low = b_y.to(low)
    b_read = tl.dot(b_gp, b_low, acc=b_read, input_precision=S.PRECISION)
    if S.TIED:
        b_row = tl.dot(b_gm, b_low, acc=b_row, input_precision=S.PRECISION)
    b_q = tiles.load_tile(y.q, at.first, i_key, i_k, o_t, m_q, o_k, S.H, S.K, S)
    b_x = rounded(b_q.to(tl.float32) * (norm_q * y.scale)[:, None] * b_lead, low)
    b_z = b_x * b_read
    b_read *= b_lead * (norm_q * y.scale)[:, None]
    if S.HV > S.H:
        b_read += b_dq
    else:
        store_tile(y.d_q, at.first, i_key, i_k, o_t, m_q, o_k, b_read, S.H, S.K, S.TMA)
    b_turn = b_x.to(low)
    if S.TIED:
        # These are rows -beta k.
        b_u = rounded(b_k * -b_lead, low)
        b_z += b_u * b_row
        b_row *= b_lead
        b_turn2 = b_u.to(low)
    b_col, b_sd = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BC, S.BC], tl.float32)
    for i_v in range(0, S.V, S.BV):
        b_e = tiles.load_errors(x, at, i_v, S)
        b_s = tiles.load_state(x.states, at.slot, i_v, i_k, S)
        b_d = tiles.load_state(x.d_states, at.slot, i_v, i_k, S)
        b_col = tl.dot(b_e, b_d, acc=b_col, input_precision=S.PRECISION)
        b_sd = tl.dot(tl.trans(b_s), b_d, acc=b_sd, input_precision=S.PRECISION)
    b_col *= b_all[None, :]
    b_end = 2.0**-S.SHIFT * b_all * tiles.diagonal(b_sd) + tl.sum(b_y * b_col, axis=0)
    b_col = tl.dot(b_turned, b_turn, acc=b_col, input_precision=S.PRECISION)
    if S.TIED:
        b_col = tl.dot(b_turned2, b_turn2, acc=b_col, input_precision=S.PRECISION)
    b_z -= b_y * b_col
    b_col = (b_col * b_near - b_row) * (norm_k * b_beta)[:, None]
    b_ones = tiles.load_chunk(y.ones, i_c * 0, 0, S.BT, S.BT, S.BT, S.TMA)
    b_z = sum_rows(tl.trans(b_ones), b_z, low, S.PRECISION) + b_end[None, :]
    store_tile(y.d_log_decay, at.first, at.head, i_k, o_t, m_g, o_k, b_z, S.HV, S.K, S.TMA)
    store_value_gradients(y.d_v, x.d_errors, b_beta, i_c, at, o_r, m_r, S)
    if S.HV > S.H:
        b_col += b_dk
    return b_read, b_col


@triton.jit(do_not_specialize=["T", "N"])
def fast_gradients_kernel(
    ones, q, k, v, beta, log_decay, cu_seqlens, states, errors, d_o, d_states, d_errors, p_q, p_k,
    d_q, d_k, d_v, d_beta, d_log_decay, scale, T, N, s_beta_b, s_beta_t, s_beta_h, S: tl.constexpr,
):  # fmt: skip
    """Gradients in the layouts of their tensors, those by beta and log_decay in float32.

    `ones` [BT, BT] has ones up to the diagonal. With TMA every tile is full, and its tensor a
    descriptor; p_q and p_k are q and k as pointers.
    `unit_norm_gradients_kernel` takes them through unit norms afterwards.
    """
    x = tiles.Around(v, states, errors, d_o, d_states, d_errors)
    y = Rows(ones, q, k, log_decay, d_q, d_v, d_beta, d_log_decay, scale)
    # The programs of a chunk run side by side, and share what they read in the cache.
    i_c, i_key, i_m = place_of((S.K + S.BC - 1) // S.BC, S.H)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    if tokens <= 0:
        return
    rows = tl.minimum(tokens, S.CT) * S.N_STEPS
    o_r, o_k = tl.arange(0, S.BT), i_c * S.BC + tl.arange(0, S.BC)
    m_r = o_r < rows
    o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    norm_q, norm_k = tl.full([S.BT], 1.0, tl.float32), tl.full([S.BT], 1.0, tl.float32)
    if S.UNIT_NORM:
        # A norm has all channels, though the program takes BC of them.
        o_all = tl.arange(0, S.BK)
        p_q += (first * S.H + i_key) * S.K
        p_k += (first * S.N_STEPS * S.H + i_key) * S.K
        b_all = tiles.load_rows(p_q, o_t, m_q, o_all, S.K, S.H * S.K, S.K == S.BK)
        norm_q = tiles.inverse_norm(b_all)
        b_all = tiles.load_rows(p_k, o_r, m_r, o_all, S.K, S.H * S.K, S.K == S.BK)
        norm_k = tiles.inverse_norm(b_all)
    b_dq, b_dk = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    i_b, i_t = first // T, first % T
    for i_g in range(S.HV // S.H):
        i_h = i_key * (S.HV // S.H) + i_g
        i_slot = i_m.to(tl.int64) * S.HV + i_h
        p_beta = beta
        if S.TIED:
            p_beta += i_b * s_beta_b + i_t * S.N_STEPS * s_beta_t + i_h * s_beta_h
        at = tiles.Chunk(first, tokens, rows, i_h, i_slot, i_slot)
        b_dq, b_dk = add_value_head(
            b_dq, b_dk, norm_q, norm_k, x, y, at, p_beta, s_beta_t, i_c, i_key, S
        )
    if S.HV > S.H:
        store_tile(d_q, first, i_key, i_c * S.BC, o_t, m_q, o_k, b_dq, S.H, S.K, S.TMA)
    store_tile(d_k, first * S.N_STEPS, i_key, i_c * S.BC, o_r, m_r, o_k, b_dk, S.H, S.K, S.TMA)
