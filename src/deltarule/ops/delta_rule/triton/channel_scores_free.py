"""The scores of a free erase with a decay per channel, fast: one product for each of the four.

Flagged rows are those of channel_scores_fast.py, scores, decayed rows and the rest those of
channel_scores_exact.py. With c_i the sum of base-2 log decays from the chunk's start to row i,
and c'_i the one without the row's own, both rows meet both columns:

    q_i 2^c_i      a_i 2^c'_i      b_j 2^-c_j      k_j 2^-c_j

Sums over rows are products with a triangle of ones, which leave c in the registers in which tensor
cores take and leave tiles: adding up row by row takes all six tiles to others and back.
"""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton import tiles
from deltarule.ops.delta_rule.triton.channel_decay import GONE
from deltarule.ops.delta_rule.triton.channel_gradients_fast import store_tile, sum_rows
from deltarule.ops.delta_rule.triton.channel_scores_fast import (
    LARGEST,
    count_fast_rows,
    product,
)
from deltarule.ops.delta_rule.triton.tiles import LOG2_E, RESET, correction
from deltarule.ops.runtime.places import chunk_place, place_of


@triton.jit
def exact_sums(b_ones, b_g, low: tl.constexpr):
    """The sums of rows up to each; in three parts, which hold all digits of a float32."""
    if low == tl.bfloat16:
        b_high = (b_g.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        b_sum = sum_rows(b_ones, b_g - b_high, low, "tf32")
        b_sum = tl.dot(b_ones, b_high.to(low), acc=b_sum)
    else:
        b_sum = sum_rows(b_ones, b_g, low, "ieee")
    return b_sum


@triton.jit
def store_decayed(x, i_slot, i_k, o_r, o_k, b_x, S: tl.constexpr):
    """Write channels of all rows [BT, K] of a chunk."""
    store_tile(x, i_slot * S.BT, 0, i_k, o_r, o_r < S.BT, o_k, b_x, 1, S.K, S.TMA)


@triton.jit
def store_pairs(x, i_slot, o_r, b_x, S: tl.constexpr):
    store_tile(x, i_slot * S.BT, 0, 0, o_r, o_r < S.BT, o_r, b_x, 1, S.BT, S.TMA)


@triton.jit(do_not_specialize=["T", "N"])
def free_scores_kernel(
    ones, q, k, a, b, log_decay, decays, cu_seqlens, decayed_q, decayed_k, erase, write, scores,
    value_scores, corrections, from_values, chunk_decay, fast_rows, scale, T, N, s_decay_b,
    s_decay_t, s_decay_h, s_decay_k, S: tl.constexpr,
):  # fmt: skip
    """As both launches of `exact_scores_kernel`; fast_rows as of `fast_scores_kernel`.

    Of flagged chunks `write` and decayed_k are to be written again as a whole. With TMA every tile
    is full, and its tensor a descriptor; `decays` is log_decay in one piece.
    """
    _, i_h, i_m = place_of(1, S.HV)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    if tokens <= 0:
        tl.store(fast_rows + i_slot, S.BT)
        return
    rows = tl.minimum(tokens, S.CT)
    i_key, o_r = i_h // (S.HV // S.H), tl.arange(0, S.BT)
    m_r = o_r < rows
    low_type: tl.constexpr = ones.dtype if S.TMA else ones.dtype.element_ty
    b_p, b_p2 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    b_l, b_l2 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    b_low = tl.zeros([S.BC], tl.float32)
    b_ones = tiles.load_chunk(ones, i_slot * 0, 0, S.BT, S.BT, S.BT, S.TMA)
    for i_k in tl.range(0, S.K, S.BC):
        o_k = i_k + tl.arange(0, S.BC)
        b_g = tiles.load_tile(decays, first, i_h, i_k, o_r, m_r, o_k, S.HV, S.K, S).to(tl.float32)
        b_b = tiles.load_tile(b, first, i_h, i_k, o_r, m_r, o_k, S.HV, S.K, S)
        b_k = tiles.load_tile(k, first, i_key, i_k, o_r, m_r, o_k, S.H, S.K, S)
        b_q = tiles.load_tile(q, first, i_key, i_k, o_r, m_r, o_k, S.H, S.K, S)
        b_a = tiles.load_tile(a, first, i_h, i_k, o_r, m_r, o_k, S.HV, S.K, S)
        # No number counts as a reset, too: such rows are flagged.
        b_g = tl.where(b_g >= RESET, b_g * LOG2_E, GONE)
        b_c = exact_sums(b_ones, b_g, low_type)
        # Sums never grow: that of all rows is the least.
        b_end = tl.min(b_c, axis=0)
        b_low = tl.minimum(b_low, b_end)
        tl.store(chunk_decay + i_slot * S.K + o_k, tl.exp2(b_end), mask=o_k < S.K)
        b_c += S.SHIFT
        b_near, b_end = tl.exp2(-b_c), tl.exp2(b_end + S.SHIFT)[None, :]
        b_y, b_y2 = b_b.to(tl.float32) * b_near, b_k.to(tl.float32) * b_near
        store_decayed(write, i_slot, i_k, o_r, o_k, b_y * b_end, S)
        store_decayed(decayed_k, i_slot, i_k, o_r, o_k, b_y2 * b_end, S)
        b_x = b_q.to(tl.float32) * (tl.exp2(b_c) * scale)
        store_decayed(decayed_q, i_slot, i_k, o_r, o_k, b_x * 2.0**-S.SHIFT, S)
        b_p = product(b_x, b_y, b_p, S.PRECISION)
        b_p2 = product(b_x, b_y2, b_p2, S.PRECISION)
        b_x = b_a.to(tl.float32) * tl.exp2(b_c - b_g)
        store_decayed(erase, i_slot, i_k, o_r, o_k, b_x * 2.0**-S.SHIFT, S)
        b_l = product(b_x, b_y, b_l, S.PRECISION)
        b_l2 = product(b_x, b_y2, b_l2, S.PRECISION)
    up_to, before = o_r[None, :] <= o_r[:, None], o_r[None, :] < o_r[:, None]
    store_pairs(scores, i_slot, o_r, tl.where(up_to, b_p, 0.0), S)
    store_pairs(value_scores, i_slot, o_r, tl.where(up_to, b_p2, 0.0), S)
    store_pairs(from_values, i_slot, o_r, tl.where(before, b_l2, 0.0), S)
    # What overflowed must not meet the zeros of other rows.
    b_l = tl.where(before & (tl.abs(b_l) <= LARGEST), b_l, 0.0)
    b_l = correction(b_l, tl.full([S.BT], 1.0, tl.float32), S.BT, S.MERGE)
    store_pairs(corrections, i_slot, o_r, b_l, S)
    fast = S.BT
    # This sum and those of the rows may differ in their last digits, and the rows' own decide.
    if tl.min(b_low) < 1.0 - S.RANGE:
        p_g = log_decay + first // T * s_decay_b + first % T * s_decay_t + i_h * s_decay_h
        fast = count_fast_rows(p_g, rows, s_decay_t, s_decay_k, S)
    tl.store(fast_rows + i_slot, fast)
