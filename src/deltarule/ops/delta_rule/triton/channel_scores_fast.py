"""The scores of a chunk's rows with a decay per channel, fast: one product for all of them.

Scores, decayed keys and the rest are those of channel_scores_exact.py without a free erase. There a
score takes three products and the sums of decays are kept; here one, and nothing is kept.
"""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.channel_decay import GONE
from deltarule.ops.delta_rule.triton.channel_tiles import inverse_norms, store_scores, store_square
from deltarule.ops.delta_rule.triton.tiles import LOG2_E, RESET, SCALING, SCALINGS, correction
from deltarule.ops.runtime.places import chunk_place, place_of

# Decays inside a chunk, all from its start: device functions.
#
# With c_i the sum of base-2 log decays from the chunk's start, which is in the past of every pair,
# to row i, all pairs of rows take one product:
#
#     decay(j, i] = 2^(c_i + SHIFT) 2^-(c_j + SHIFT)
#
# SHIFT makes half of the exponents positive, so that float32 has room for c down to -RANGE; both
# leave 2^46 to what is multiplied, tiny gradients and large keys. Rows whose c is lower are
# flagged, and `exact_scores_kernel` computes them: as c never grows, these are the last of a
# chunk, and a strong decay changes no digit of the rows before it.
#
# Tiles of rows are [BT // DEEP, DEEP, channels]: a thread has DEEP rows that follow each other, and
# adds up their decays on its own.


@triton.jit
def rows_of(BT: tl.constexpr, DEEP: tl.constexpr):
    """The rows of a tile, [BT // DEEP, DEEP, 1]."""
    return tl.arange(0, BT // DEEP)[:, None, None] * DEEP + tl.arange(0, DEEP)[None, :, None]


@triton.jit
def deep(b_x, DEEP: tl.constexpr):
    """A number of every row as [rows // DEEP, DEEP, 1]."""
    return tl.reshape(b_x, (b_x.shape[0] // DEEP, DEEP, 1))


@triton.jit
def flat(b_x):
    """[rows // DEEP, DEEP, channels], or what is flat, as [rows, channels]."""
    if len(b_x.shape) == 3:
        b_x = tl.reshape(b_x, (b_x.shape[0] * b_x.shape[1], b_x.shape[2]))
    return b_x


@triton.jit
def load_deep(p_x, o_r, m_r, o_k, stride, K: tl.constexpr):
    return tl.load(p_x + o_r * stride + o_k, mask=m_r & (o_k < K), other=0.0)


@triton.jit
def store_deep(p_x, o_r, o_k, b_x, K: tl.constexpr, m_r):
    tl.store(p_x + o_r * K + o_k, b_x.to(p_x.dtype.element_ty), mask=m_r & (o_k < K))


@triton.jit
def load_decays(p_g, o_r, rows, o_k, s_t, s_k, K: tl.constexpr, N_STEPS: tl.constexpr):
    """Log decays to base 2; the first of each token's rows decays."""
    mask = (o_r < rows) & (o_r % N_STEPS == 0) & (o_k < K)
    b_g = tl.load(p_g + o_r // N_STEPS * s_t + o_k * s_k, mask=mask, other=0.0).to(tl.float32)
    # No number counts as a reset, too: such rows are flagged.
    return tl.where(b_g >= RESET, b_g * LOG2_E, GONE)


@triton.jit
def followed_by(before, own, before_next, own_next):
    """Two stretches as one: the sum of all but the last row of a scan, and of all."""
    return own + before_next, own + own_next


@triton.jit
def sums_from_start(b_g):
    """For each row the sum of the rows up to it, and that of all rows, [1, 1, channels].

    No sum takes a later row in and out again, which would cost it digits.
    """
    b_some = tl.sum(b_g, axis=1)
    b_before, _ = tl.associative_scan((b_some * 0.0, b_some), 0, followed_by)
    return tl.cumsum(b_g, axis=1) + b_before[:, None, :], tl.sum(b_some, axis=0)[None, None, :]


@triton.jit
def count_fast_rows(p_g, rows, s_t, s_k, S: tl.constexpr):
    """How many rows of a chunk come before the first for which a channel is below -RANGE."""
    o_r = rows_of(S.BT, S.DEEP)
    b_least = tl.zeros([S.BT // S.DEEP, S.DEEP], tl.float32)
    for i_k in range(0, S.K, S.BC):
        o_k = i_k + tl.arange(0, S.BC)[None, None, :]
        b_c, _ = sums_from_start(load_decays(p_g, o_r, rows, o_k, s_t, s_k, S.K, S.N_STEPS))
        b_least = tl.minimum(b_least, tl.min(b_c, axis=2))
    return tl.sum(tl.sum((b_least >= -S.RANGE).to(tl.int32), axis=1), axis=0)


# What is larger, or no number at all, came of an overflow.
LARGEST = tl.constexpr(3e38)


@triton.jit
def product(b_x, b_y, b_acc, PRECISION: tl.constexpr):
    if PRECISION == "tf32":
        # Half of the last digit that counts: tensor cores cut off what is below.
        b_x = (b_x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        b_y = (b_y.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    return tl.dot(flat(b_x), tl.trans(flat(b_y)), acc=b_acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "N"])
def fast_scores_kernel(
    q, k, beta, log_decay, cu_seqlens, decayed_q, erase, write, scores, corrections, scalings,
    chunk_decay, fast_rows, scale, T, N, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t,
    s_decay_h, s_decay_k, S: tl.constexpr,
):  # fmt: skip
    """As `exact_scores_kernel`; fast_rows [M, HV] says how many rows of a chunk came out right.

    The rows after them are flagged: these, and `write` of their chunk, are to be written again.
    """
    _, i_h, i_m = place_of(1, S.HV)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    if tokens <= 0:
        tl.store(fast_rows + i_slot, S.BT)
        return
    rows = tl.minimum(tokens, S.CT) * S.N_STEPS
    i_b, i_t, i_key = first // T, first % T, i_h // (S.HV // S.H)
    o_r, o_f = rows_of(S.BT, S.DEEP), tl.arange(0, S.BT)
    m_r, m_f = o_r < rows, o_f < rows
    # A query takes part as the last row of its token.
    m_last = o_r % S.N_STEPS == S.N_STEPS - 1
    p_q, p_k = q + (first * S.H + i_key) * S.K, k + (first * S.N_STEPS * S.H + i_key) * S.K
    p_g = log_decay + i_b * s_decay_b + i_t * s_decay_t + i_h * s_decay_h
    norm_k, read = 1.0, scale
    if S.UNIT_NORM:
        m_q = m_f & (o_f % S.N_STEPS == S.N_STEPS - 1)
        norm_k = deep(inverse_norms(p_k, o_f, m_f, S), S.DEEP)
        read = deep(inverse_norms(p_q, o_f // S.N_STEPS, m_q, S), S.DEEP) * scale
    b_s, b_m = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    low = 0.0
    for i_k in tl.static_range(0, S.K, S.BC):
        o_k = i_k + tl.arange(0, S.BC)[None, None, :]
        b_g = load_decays(p_g, o_r, rows, o_k, s_decay_t, s_decay_k, S.K, S.N_STEPS)
        b_q = load_deep(p_q, o_r // S.N_STEPS, m_r & m_last, o_k, S.H * S.K, S.K)
        b_k = load_deep(p_k, o_r, m_r, o_k, S.H * S.K, S.K)
        b_c, b_end = sums_from_start(b_g)
        low = tl.minimum(low, tl.min(b_end))
        tl.store(chunk_decay + i_slot * S.K + o_k, tl.exp2(b_end), mask=o_k < S.K)
        b_c += S.SHIFT
        b_y = b_k.to(tl.float32) * norm_k
        b_near = b_y * tl.exp2(-b_c)
        b_end = b_near * tl.exp2(b_end + S.SHIFT)
        store_deep(write + i_slot * S.BT * S.K, o_r, o_k, b_end, S.K, o_r < S.BT)
        b_c = tl.exp2(b_c)
        if S.ERASE == "tied":
            b_y *= b_c
            b_m = product(b_y, b_near, b_m, S.PRECISION)
            # A power of two is exact, another exponential without the shift would not be the same.
            store_deep(erase + i_slot * S.BT * S.K, o_r, o_k, b_y * 2.0**-S.SHIFT, S.K, o_r < S.BT)
        b_x = b_q.to(tl.float32) * (b_c * read)
        b_s = product(b_x, b_near, b_s, S.PRECISION)
        b_x *= 2.0**-S.SHIFT
        store_deep(decayed_q + i_slot * S.BQ * S.K, o_r // S.N_STEPS, o_k, b_x, S.K, m_last)
        if S.N_STEPS * S.BQ > S.BT:
            # Rows that no row of the chunk stands for.
            o_q = rows_of(S.BQ, S.DEEP)
            b_zero = tl.zeros([S.BQ // S.DEEP, S.DEEP, S.BC], tl.float32)
            store_deep(decayed_q + i_slot * S.BQ * S.K, o_q, o_k, b_zero, S.K, o_q >= S.CT)
    if S.ERASE == "tied":
        # Fetched here, so that it is there when the scores are stored.
        p_beta = beta + i_b * s_beta_b + i_t * S.N_STEPS * s_beta_t + i_h * s_beta_h
        b_beta = tl.load(p_beta + o_f * s_beta_t, mask=m_f, other=0.0).to(tl.float32)
    store_scores(scores, i_slot, o_f, b_s, 0, S)
    if S.ERASE == "tied":
        # What overflowed must not meet the zeros of other rows.
        m_m = (o_f[None, :] < o_f[:, None]) & (tl.abs(b_m) <= LARGEST)
        b_n = correction(tl.where(m_m, -b_m, 0.0), b_beta, S.BT, S.MERGE)
        store_square(corrections, i_slot, b_n, 0, S.BT)
        tl.store(scalings + (i_slot * SCALINGS + SCALING.BETA) * S.BT + o_f, b_beta)
    fast = S.BT
    # This sum and those of the rows may differ in their last digits, and the rows' own decide.
    if low < 1.0 - S.RANGE:
        fast = count_fast_rows(p_g, rows, s_decay_t, s_decay_k, S)
    tl.store(fast_rows + i_slot, fast)
