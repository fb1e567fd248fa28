"""The gradients of a free erase with a decay per channel, fast: all decays from the chunk's start.

The pairs G are those of channel_gradients_exact.py, c and the rest those of
channel_gradients_fast.py, and c'_i is c_i without the row's own decay:

    x_i = q_i 2^c_i      u_i = a_i 2^c'_i      y_j = b_j 2^-c_j      z_j = k_j 2^-c_j

    read = 2^-SHIFT scale S^T dO + G_1 y + G_3 z      dq = 2^c read
    row  = 2^-SHIFT S^T X        + G_2 y + G_4 z      da = 2^c' row
    col  = 2^c_end D^T E + G_1^T x + G_2^T u          db = 2^-c col
    colk = 2^c_end D^T v + G_3^T x + G_4^T u          dk = 2^-c colk

The row's own decay is in none of the pairs of a:

    dlog_decay_t = sum_{i >= t} (x read + u row - y col - z colk)_i - u_t row_t
                   + sum_j (y_j 2^c_end D^T E_j + z_j 2^c_end D^T v_j) + decay[0, end] sum_v D S
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton import tiles
from deltarule.ops.delta_rule.triton.channel_gradients_fast import rounded, store_tile, sum_rows
from deltarule.ops.delta_rule.triton.tiles import LOG2_E
from deltarule.ops.runtime.places import chunk_place, place_of

# Pairs, a triangle of ones, the rows of all tokens, and where gradients go.
FreeRows = namedtuple("FreeRows", "pairs ones q k a b log_decay d_q d_k d_a d_b d_log_decay scale")
# G_1 to G_4.
PAIRS = tl.constexpr(4)


@triton.jit
def load_pairs(y, at, number: tl.constexpr, S: tl.constexpr):
    return tiles.load_chunk(y.pairs, at.slot * PAIRS + number, 0, S.BT, S.BT, S.BT, S.TMA)


@triton.jit
def value_products(x, at, i_k, o_r, m_r, scale, S: tl.constexpr):
    """scale S^T dO and S^T X."""
    b_read, b_row = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_do = tiles.load_tile(x.d_o, at.first, at.head, i_v, o_r, m_r, o_v, S.HV, S.V, S)
        b_x = tiles.load_chunk(x.d_errors, at.slot, i_v, S.V, S.BT, S.BV, S.TMA)
        b_s = tiles.load_state(x.states, at.slot, i_v, i_k, S)
        b_read = tl.dot(b_do, b_s, acc=b_read, input_precision=S.PRECISION)
        b_row = tl.dot(b_x, b_s, acc=b_row, input_precision=S.PRECISION)
    return b_read * scale, b_row


@triton.jit
def end_products(x, at, i_k, o_r, m_r, S: tl.constexpr):
    """D^T E, D^T v and, of every channel, sum_v D S."""
    b_col, b_colk = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    b_sd = tl.zeros([S.BC, S.BC], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_e = tiles.load_chunk(x.errors, at.slot, i_v, S.V, S.BT, S.BV, S.TMA)
        b_v = tiles.load_tile(x.v, at.first, at.head, i_v, o_r, m_r, o_v, S.HV, S.V, S)
        b_s = tiles.load_state(x.states, at.slot, i_v, i_k, S)
        b_d = tiles.load_state(x.d_states, at.slot, i_v, i_k, S)
        b_col = tl.dot(b_e, b_d, acc=b_col, input_precision=S.PRECISION)
        b_colk = tl.dot(b_v, b_d, acc=b_colk, input_precision=S.PRECISION)
        b_sd = tl.dot(tl.trans(b_s), b_d, acc=b_sd, input_precision=S.PRECISION)
    return b_col, b_colk, tiles.diagonal(b_sd)


@triton.jit
def add_value_head(b_dq, b_dk, x, y, at, i_c, i_key, S: tl.constexpr):
    """dq and dk with one value head's part; its da, db and dlog_decay are stored."""
    low: tl.constexpr = y.q.dtype if S.TMA else y.q.dtype.element_ty
    i_k, o_r = i_c * S.BC, tl.arange(0, S.BT)
    o_k, m_r = i_k + tl.arange(0, S.BC), o_r < at.rows
    b_read, b_row = value_products(x, at, i_k, o_r, m_r, y.scale, S)
    b_read *= 2.0**-S.SHIFT
    b_row *= 2.0**-S.SHIFT
    b_g = tiles.load_tile(y.log_decay, at.first, at.head, i_k, o_r, m_r, o_k, S.HV, S.K, S)
    b_g = b_g.to(tl.float32) * LOG2_E
    b_ones = tiles.load_chunk(y.ones, i_c * 0, 0, S.BT, S.BT, S.BT, S.TMA)
    b_c = sum_rows(b_ones, b_g, low, S.PRECISION) + S.SHIFT
    # Sums never grow: that of all rows is the least.
    b_all = tl.exp2(tl.min(b_c, axis=0))
    b_near = tl.exp2(-b_c)
    b_b = tiles.load_tile(y.b, at.first, at.head, i_k, o_r, m_r, o_k, S.HV, S.K, S)
    b_k = tiles.load_tile(y.k, at.first, i_key, i_k, o_r, m_r, o_k, S.H, S.K, S)
    b_low, b_low2 = (b_b.to(tl.float32) * b_near).to(low), (b_k.to(tl.float32) * b_near).to(low)
    b_read = tl.dot(load_pairs(y, at, 0, S), b_low, acc=b_read, input_precision=S.PRECISION)
    b_row = tl.dot(load_pairs(y, at, 1, S), b_low, acc=b_row, input_precision=S.PRECISION)
    b_read = tl.dot(load_pairs(y, at, 2, S), b_low2, acc=b_read, input_precision=S.PRECISION)
    b_row = tl.dot(load_pairs(y, at, 3, S), b_low2, acc=b_row, input_precision=S.PRECISION)
    b_q = tiles.load_tile(y.q, at.first, i_key, i_k, o_r, m_r, o_k, S.H, S.K, S)
    b_a = tiles.load_tile(y.a, at.first, at.head, i_k, o_r, m_r, o_k, S.HV, S.K, S)
    b_lead = tl.exp2(b_c)
    b_x = rounded(b_q.to(tl.float32) * b_lead, low)
    b_z = b_x * b_read
    b_read *= b_lead
    if S.HV > S.H:
        b_read += b_dq
    else:
        store_tile(y.d_q, at.first, i_key, i_k, o_r, m_r, o_k, b_read, S.H, S.K, S.TMA)
    b_lead = tl.exp2(b_c - b_g)
    b_u = rounded(b_a.to(tl.float32) * b_lead, low)
    b_own = b_u * b_row
    store_tile(y.d_a, at.first, at.head, i_k, o_r, m_r, o_k, b_row * b_lead, S.HV, S.K, S.TMA)
    b_x, b_u = b_x.to(low), b_u.to(low)
    b_col, b_colk, b_end = end_products(x, at, i_k, o_r, m_r, S)
    b_col *= b_all[None, :]
    b_colk *= b_all[None, :]
    b_y, b_y2 = b_low.to(tl.float32), b_low2.to(tl.float32)
    b_end = 2.0**-S.SHIFT * b_all * b_end + tl.sum(b_y * b_col + b_y2 * b_colk, axis=0)
    b_turned = tl.trans(load_pairs(y, at, 0, S))
    b_col = tl.dot(b_turned, b_x, acc=b_col, input_precision=S.PRECISION)
    b_turned = tl.trans(load_pairs(y, at, 1, S))
    b_col = tl.dot(b_turned, b_u, acc=b_col, input_precision=S.PRECISION)
    b_turned = tl.trans(load_pairs(y, at, 2, S))
    b_colk = tl.dot(b_turned, b_x, acc=b_colk, input_precision=S.PRECISION)
    b_turned = tl.trans(load_pairs(y, at, 3, S))
    b_colk = tl.dot(b_turned, b_u, acc=b_colk, input_precision=S.PRECISION)
    b_z -= b_y * b_col + b_y2 * b_colk
    store_tile(y.d_b, at.first, at.head, i_k, o_r, m_r, o_k, b_col * b_near, S.HV, S.K, S.TMA)
    b_ones = tl.trans(tiles.load_chunk(y.ones, i_c * 0, 0, S.BT, S.BT, S.BT, S.TMA))
    b_z = sum_rows(b_ones, b_z + b_own, low, S.PRECISION) - b_own + b_end[None, :]
    store_tile(y.d_log_decay, at.first, at.head, i_k, o_r, m_r, o_k, b_z, S.HV, S.K, S.TMA)
    b_colk *= b_near
    if S.HV > S.H:
        b_colk += b_dk
    return b_read, b_colk


@triton.jit(do_not_specialize=["T", "N"])
def free_gradients_kernel(
    ones, pairs, q, k, v, a, b, log_decay, cu_seqlens, states, errors, d_o, d_states, d_errors, d_q,
    d_k, d_a, d_b, d_log_decay, scale, T, N, S: tl.constexpr,
):  # fmt: skip
    """As `fast_gradients_kernel`, but for dv, which is left with the pairs."""
    x = tiles.Around(v, states, errors, d_o, d_states, d_errors)
    y = FreeRows(pairs, ones, q, k, a, b, log_decay, d_q, d_k, d_a, d_b, d_log_decay, scale)
    # The programs of a chunk run side by side, and share what they read in the cache.
    i_c, i_key, i_m = place_of((S.K + S.BC - 1) // S.BC, S.H)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    if tokens <= 0:
        return
    rows = tl.minimum(tokens, S.CT)
    b_dq, b_dk = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    for i_g in range(S.HV // S.H):
        i_h = i_key * (S.HV // S.H) + i_g
        i_slot = i_m.to(tl.int64) * S.HV + i_h
        at = tiles.Chunk(first, tokens, rows, i_h, i_slot, i_slot)
        b_dq, b_dk = add_value_head(b_dq, b_dk, x, y, at, i_c, i_key, S)
    i_k, o_r = i_c * S.BC, tl.arange(0, S.BT)
    o_k, m_r = i_k + tl.arange(0, S.BC), o_r < rows
    if S.HV > S.H:
        store_tile(d_q, first, i_key, i_k, o_r, m_r, o_k, b_dq, S.H, S.K, S.TMA)
    store_tile(d_k, first, i_key, i_k, o_r, m_r, o_k, b_dk, S.H, S.K, S.TMA)
