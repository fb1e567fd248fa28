"""Products of decays inside a chunk whose channels decay apart, by blocks of 16 rows.

A product over pairs of rows needs decay(j, i] inside its sum over channels, so each side brings a
factor, and the two meet at a point in the past of row i. With base-2 logarithms and sums that
stay inside one block, lead_i from the block's start to row i, tail_j after row j to its end:

    decay(j, i] = 2^tail_j between 2^lead_i       i in a later block: factors of 1 at most
    decay(j, i] = 2^-lead_j 2^lead_i              in one block, while -lead_j <= BAR

and what is left, columns j with a lead below the bar, goes pair by pair. Blocks meet in two levels:
late rows of a pair of blocks against its early columns, 1 | 0 and 3 | 2, then 2, 3 | 0, 1. A
reset, a log decay below -60, counts as one whose power of 2 is 0. Sums of equal sign lose nothing.

The sums of a chunk are kept, [M, HV, ROWS, K] in float32:

    rows 0..63    lead
    rows 64..67   for each block the decay of the blocks before it, 68..71 of those after it
    rows 72..75   of the late half's blocks before it (early blocks: 0), 76..79 the other way round
    row 80        the least lead of all, in its first channel
    rows 84..147  tail, of float32 inputs
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.tiles import LOG2_E, RESET, Sizes
from deltarule.ops.runtime.places import chunk_place
from deltarule.ops.runtime.unit_norm import EPSILON

BLOCK = tl.constexpr(16)
# 2 to it is 0.
GONE = tl.constexpr(-384.0)
ROWS = tl.constexpr(148)
BEFORE, AFTER = tl.constexpr(64), tl.constexpr(68)
LATE, EARLY = tl.constexpr(72), tl.constexpr(76)
LEAST, TAILS = tl.constexpr(80), tl.constexpr(84)


class Gates(NamedTuple):
    """beta and log_decay of all rows with their strides, and T."""

    beta: tl.tensor
    log_decay: tl.tensor
    T: tl.tensor
    s_beta_b: tl.tensor
    s_beta_t: tl.tensor
    s_beta_h: tl.tensor
    s_decay_b: tl.tensor
    s_decay_t: tl.tensor
    s_decay_h: tl.tensor
    s_decay_k: tl.tensor


@triton.jit
def load_beta(g, first, i_h, o_r, m_r, S: tl.constexpr):
    """beta of the rows o_r of a chunk."""
    p_beta = g.beta + first // g.T * g.s_beta_b + first % g.T * S.N_STEPS * g.s_beta_t
    p_beta += i_h * g.s_beta_h
    return tl.load(p_beta + o_r * g.s_beta_t, mask=m_r, other=0.0).to(tl.float32)


@triton.jit
def decays_of(g, first, i_h):
    """Where the log decays of a chunk and head begin."""
    return g.log_decay + first // g.T * g.s_decay_b + first % g.T * g.s_decay_t + i_h * g.s_decay_h


@triton.jit
def load_channels(p_x, o_r, m_r, o_k, stride, K: tl.constexpr):
    """Rows o_r (addresses p_x apart by stride) and channels o_k, in float32."""
    mask = m_r[:, None] & (o_k < K)[None, :]
    return tl.load(p_x + o_r[:, None] * stride + o_k[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def inverse_norms(
    p_x, o_r, m_r, stride, K: tl.constexpr, BC: tl.constexpr, UNIT_NORM: tl.constexpr
):
    """1 / |x| of every row, or ones."""
    b_norm = tl.full(o_r.shape, 1.0, tl.float32)
    if UNIT_NORM:
        b_square = tl.zeros(o_r.shape, tl.float32)
        for i_k in range(0, K, BC):
            b_x = load_channels(p_x, o_r, m_r, i_k + tl.arange(0, BC), stride, K)
            b_square += tl.sum(b_x * b_x, axis=1)
        b_norm = tl.rsqrt(b_square + EPSILON)
    return b_norm


@triton.jit
def store_channels(x, i_slot, o_r, o_k, b_x, ROWS: tl.constexpr, K: tl.constexpr, m_r):
    """Write rows o_r of a chunk's tile of a tensor [M, HV, ROWS, K]."""
    p_x = x + i_slot * ROWS * K + o_r[:, None] * K + o_k[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_r[:, None] & (o_k < K)[None, :])


@triton.jit
def store_square(x, i_slot, b_x, start, BT: tl.constexpr):
    """Write the rows from `start` on of a chunk's tile of a tensor [M, HV, BT, BT]."""
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    p_x = x + i_slot * BT * BT + o_i * BT + o_j
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=(o_i >= start) & (o_j >= 0))


@triton.jit
def store_scores(scores, i_slot, o_r, b_s, start, S: tl.constexpr):
    """Write the rows from `start` on that are queries, [BQ, BT] of a chunk, up to the diagonal."""
    o_i, o_j = o_r[:, None], o_r[None, :]
    p_s = scores + i_slot * S.BQ * S.BT
    b_s = tl.where(o_j <= o_i, b_s, 0.0).to(scores.dtype.element_ty)
    m_s = (o_i % S.N_STEPS == S.N_STEPS - 1) & (o_i >= start)
    tl.store(p_s + o_i // S.N_STEPS * S.BT + o_j, b_s, mask=m_s)
    if S.N_STEPS * S.BQ > S.BT:
        o_q = tl.arange(0, S.BQ)[:, None]
        b_zero = tl.zeros([S.BQ, S.BT], scores.dtype.element_ty)
        tl.store(p_s + o_q * S.BT + o_j, b_zero, mask=o_q >= S.CT)


@triton.jit
def channel_log_decay(
    p_g, o_r, rows, o_k, s_decay_t, s_decay_k, K: tl.constexpr, N_STEPS: tl.constexpr
):
    """Log decays of the rows o_r of a chunk, to base 2; the first of each token's rows decays."""
    mask = ((o_r < rows) & (o_r % N_STEPS == 0))[:, None] & (o_k < K)[None, :]
    p_g += (o_r // N_STEPS)[:, None] * s_decay_t + o_k[None, :] * s_decay_k
    b_g = tl.load(p_g, mask=mask, other=0.0).to(tl.float32)
    return tl.where(b_g < RESET, GONE, b_g * LOG2_E)


@triton.jit
def load_sums(p_s, o_r, o_k, K: tl.constexpr):
    """Rows o_r of a chunk's sums."""
    o_s = o_r[:, None] * K + o_k[None, :]
    if K == 1:
        # A thread would read along the rows: the assembler then loses addresses of operands.
        o_s = tl.max_contiguous(o_s, [1, 1])
    return tl.load(p_s + o_s, mask=(o_k < K)[None, :], other=0.0)


@triton.jit
def store_sums(
    p_g, p_s, rows, s_decay_t, s_decay_k,
    K: tl.constexpr, BK: tl.constexpr, N_STEPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write lead, row after row of four blocks at once, and with EXACT tail."""
    o_k = tl.arange(0, BK)
    o_b = tl.arange(0, 4) * BLOCK
    m_k = (o_k < K)[None, :]
    b_sum = tl.zeros([4, BK], tl.float32)
    for half in tl.static_range(0, BLOCK, 8):
        # Loads first: they wait for memory together.
        b_g = ()
        for i in tl.static_range(8):
            o_r = o_b + half + i
            b_next = channel_log_decay(p_g, o_r, rows, o_k, s_decay_t, s_decay_k, K, N_STEPS)
            b_g += (b_next,)  # type: ignore[assignment]
        p_r = p_s + (o_b + half)[:, None] * K + o_k[None, :]
        for i in tl.static_range(8):
            b_sum += b_g[i]
            tl.store(p_r + i * K, b_sum, mask=m_k)
    if EXACT:
        b_sum = tl.zeros([4, BK], tl.float32)
        for i_up in range(BLOCK):
            o_r = o_b + BLOCK - 1 - i_up
            tl.store(p_s + (o_r + TAILS)[:, None] * K + o_k[None, :], b_sum, mask=m_k)
            b_sum += channel_log_decay(p_g, o_r, rows, o_k, s_decay_t, s_decay_k, K, N_STEPS)
    tl.debug_barrier()


@triton.jit
def store_block_decays(p_s, p_c, K: tl.constexpr, BK: tl.constexpr):
    """Write the decays between blocks, the least lead, and the decay of the chunk to p_c."""
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    p_s += o_k
    b_0 = tl.load(p_s + 15 * K, mask=m_k, other=0.0)
    b_1 = tl.load(p_s + 31 * K, mask=m_k, other=0.0)
    b_2 = tl.load(p_s + 47 * K, mask=m_k, other=0.0)
    b_3 = tl.load(p_s + 63 * K, mask=m_k, other=0.0)
    least = tl.min(tl.minimum(tl.minimum(b_0, b_1), tl.minimum(b_2, b_3)))
    tl.store(p_s + LEAST * K, tl.zeros([BK], tl.float32) + least, mask=o_k == 0)
    b_0, b_1, b_2, b_3 = tl.exp2(b_0), tl.exp2(b_1), tl.exp2(b_2), tl.exp2(b_3)
    b_one = tl.full([BK], 1.0, tl.float32)
    store_four(p_s + BEFORE * K, m_k, b_one, b_0, b_0 * b_1, b_0 * b_1 * b_2, K)
    store_four(p_s + AFTER * K, m_k, b_1 * b_2 * b_3, b_2 * b_3, b_3, b_one, K)
    b_zero = tl.zeros([BK], tl.float32)
    store_four(p_s + LATE * K, m_k, b_zero, b_zero, b_one, b_2, K)
    store_four(p_s + EARLY * K, m_k, b_1, b_one, b_zero, b_zero, K)
    tl.store(p_c + o_k, b_0 * b_1 * b_2 * b_3, mask=m_k)
    tl.debug_barrier()


@triton.jit
def store_four(p_s, m_k, b_0, b_1, b_2, b_3, K: tl.constexpr):
    tl.store(p_s, b_0, mask=m_k)
    tl.store(p_s + K, b_1, mask=m_k)
    tl.store(p_s + 2 * K, b_2, mask=m_k)
    tl.store(p_s + 3 * K, b_3, mask=m_k)


@triton.jit
def lead_decay(p_s, o_r, o_k, K: tl.constexpr, OWN: tl.constexpr):
    """The decay from the start of each row's block to the row, with or without its own."""
    if OWN:
        b_lead = load_sums(p_s, o_r, o_k, K)
    else:
        mask = (o_r % BLOCK != 0)[:, None] & (o_k < K)[None, :]
        b_lead = tl.load(p_s + o_r[:, None] * K + o_k[None, :] - K, mask=mask, other=0.0)
    return tl.exp2(b_lead)


@triton.jit
def tail_decay(p_s, b_lead, o_r, o_k, K: tl.constexpr, EXACT: tl.constexpr):
    """The decay after each row to the end of its block."""
    if EXACT:
        b_tail = load_sums(p_s + TAILS * K, o_r, o_k, K)
    else:
        b_tail = load_sums(p_s, o_r // BLOCK * BLOCK + BLOCK - 1, o_k, K) - b_lead
    return tl.exp2(b_tail)


@triton.jit
def of_block(p_s, which: tl.constexpr, o_r, o_k, K: tl.constexpr):
    """For each row the vector of its block: BEFORE, AFTER, LATE or EARLY."""
    return load_sums(p_s + which * K, o_r // BLOCK, o_k, K)


@triton.jit
def near_decay(b_lead, BAR: tl.constexpr):
    """2^-lead where it stays below the bar, else 0."""
    return tl.where(b_lead >= -BAR, tl.exp2(tl.minimum(-b_lead, BAR)), 0.0)


@triton.jit
def rounded(b_x, PRECISION: tl.constexpr):
    """x with the digits that a tf32 product keeps: tensor cores would cut the others off."""
    if PRECISION == "tf32":
        bits = (b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        b_x = bits.to(tl.float32, bitcast=True)
    return b_x


# The chunks with rows that the fast scores flag, mostly few: few programs look through all of them.
#
# `each_chunk` calls what a kernel does with a chunk: by a program for every chunk and head, or for
# flagged chunks alone by a fixed number of programs. Program i_p looks at
#
#     i_x = chunk * HEADS + head      i_p, i_p + programs, i_p + 2 programs, ..
#
# many at once, and stops at those with fewer than BT fast rows.


# Numbers that a program looks at together, in at most so many rows.
TILE, LOOK = tl.constexpr(4096), tl.constexpr(32)


@triton.jit
def next_below(x, bar, i_x, count, PER: tl.constexpr, C: tl.constexpr):
    """The first of i_x, i_x + programs, .. whose row of x goes below the bar, or else `count`.

    x has rows of C numbers, each for PER of the `count`.
    """
    BC: tl.constexpr = triton.next_power_of_2(C)
    TALL: tl.constexpr = LOOK if BC * LOOK <= TILE else TILE // BC if BC < TILE else 1
    o_c, programs, found = tl.arange(0, BC)[None, :], tl.num_programs(0), count
    while (i_x < count) & (found == count):
        o_x = i_x + tl.arange(0, TALL) * programs
        p_x = x + (o_x // PER).to(tl.int64)[:, None] * C + o_c
        b_x = tl.load(p_x, mask=(o_x < count)[:, None] & (o_c < C), other=bar)
        found = tl.min(tl.where(tl.min(b_x, axis=1) < bar, o_x, count))
        i_x += TALL * programs
    return found


@triton.jit
def each_chunk(
    of, given, fast_rows, cu_seqlens, chunks, T, N, HEADS: tl.constexpr, S: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Call of(i_m, i_h, first, rows, *given) for every chunk of each of HEADS heads, H or HV.

    With the `fast_rows` [M, HV] of chunks, for those that are flagged in any value head of their
    key head; else the program's own one.
    """
    if fast_rows is None:
        i_m, i_h = tl.program_id(0), tl.program_id(1)
        first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, PACKED)
        if tokens > 0:
            of(i_m, i_h, first, tl.minimum(tokens, S.CT) * S.N_STEPS, *given)
    else:
        PER: tl.constexpr = HEADS // S.H
        count = chunks * HEADS
        i_x = next_below(fast_rows, S.BT, tl.program_id(0), count, PER, S.HV // S.H)
        while i_x < count:
            i_m, i_h = i_x // HEADS, i_x % HEADS
            first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, PACKED)
            if tokens > 0:
                of(i_m, i_h, first, tl.minimum(tokens, S.CT) * S.N_STEPS, *given)
            i_x = next_below(fast_rows, S.BT, i_x + tl.num_programs(0), count, PER, S.HV // S.H)


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
    log_decay, cu_seqlens, fast_rows, chunk_decay, sums, chunks, T, N, s_decay_b, s_decay_t,
    s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, ROWS, K] as above, and chunk_decay [M, HV, K]."""
    S: tl.constexpr = Sizes(
        H=H, HV=HV, K=K, N_STEPS=N_STEPS, CT=CT, BT=BT, BK=BK, EXACT=EXACT
    )  # fmt: skip
    g = Gates(None, log_decay, T, None, None, None, s_decay_b, s_decay_t, s_decay_h, s_decay_k)
    each_chunk(
        sums_of_chunk, (g, chunk_decay, sums, S), fast_rows, cu_seqlens, chunks, T, N, HV, S, PACKED
    )
