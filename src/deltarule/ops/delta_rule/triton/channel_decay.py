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

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.tiles import LOG2_E, RESET

BLOCK = tl.constexpr(16)
# 2 to it is 0.
GONE = tl.constexpr(-384.0)
ROWS = tl.constexpr(148)
BEFORE, AFTER = tl.constexpr(64), tl.constexpr(68)
LATE, EARLY = tl.constexpr(72), tl.constexpr(76)
LEAST, TAILS = tl.constexpr(80), tl.constexpr(84)


@triton.jit
def decays_of(g, first, i_h):
    return g.log_decay + first // g.T * g.s_decay_b + first % g.T * g.s_decay_t + i_h * g.s_decay_h


@triton.jit
def channel_log_decay(p_g, o_r, rows, o_k, g, S: tl.constexpr):
    """Log decays of the rows o_r of a chunk, to base 2; the first of each token's rows decays."""
    mask = ((o_r < rows) & (o_r % S.N_STEPS == 0))[:, None] & (o_k < S.K)[None, :]
    p_g += (o_r // S.N_STEPS)[:, None] * g.s_decay_t + o_k[None, :] * g.s_decay_k
    b_g = tl.load(p_g, mask=mask, other=0.0).to(tl.float32)
    return tl.where(b_g < RESET, GONE, b_g * LOG2_E)


@triton.jit
def load_sums(p_s, o_r, o_k, K: tl.constexpr):
    o_s = o_r[:, None] * K + o_k[None, :]
    if K == 1:
        # A thread would read along the rows: the assembler then loses addresses of operands.
        o_s = tl.max_contiguous(o_s, [1, 1])
    return tl.load(p_s + o_s, mask=(o_k < K)[None, :], other=0.0)


@triton.jit
def store_sums(p_g, p_s, rows, g, S: tl.constexpr):
    """Write lead, row after row of four blocks at once, and with EXACT tail."""
    o_k = tl.arange(0, S.BK)
    o_b = tl.arange(0, 4) * BLOCK
    m_k = (o_k < S.K)[None, :]
    b_sum = tl.zeros([4, S.BK], tl.float32)
    for half in tl.static_range(0, BLOCK, 8):
        # Loads first: they wait for memory together.
        b_g = ()
        for i in tl.static_range(8):
            o_r = o_b + half + i
            b_next = channel_log_decay(p_g, o_r, rows, o_k, g, S)
            b_g += (b_next,)  # type: ignore[assignment]
        p_r = p_s + (o_b + half)[:, None] * S.K + o_k[None, :]
        for i in tl.static_range(8):
            b_sum += b_g[i]
            tl.store(p_r + i * S.K, b_sum, mask=m_k)
    if S.EXACT:
        b_sum = tl.zeros([4, S.BK], tl.float32)
        for i_up in range(BLOCK):
            o_r = o_b + BLOCK - 1 - i_up
            tl.store(p_s + (o_r + TAILS)[:, None] * S.K + o_k[None, :], b_sum, mask=m_k)
            b_sum += channel_log_decay(p_g, o_r, rows, o_k, g, S)
    tl.debug_barrier()


@triton.jit
def store_block_decays(p_s, p_c, S: tl.constexpr):
    """Write the decays between blocks, the least lead, and the decay of the chunk to p_c."""
    o_k = tl.arange(0, S.BK)
    m_k = o_k < S.K
    p_s += o_k
    b_0 = tl.load(p_s + 15 * S.K, mask=m_k, other=0.0)
    b_1 = tl.load(p_s + 31 * S.K, mask=m_k, other=0.0)
    b_2 = tl.load(p_s + 47 * S.K, mask=m_k, other=0.0)
    b_3 = tl.load(p_s + 63 * S.K, mask=m_k, other=0.0)
    least = tl.min(tl.minimum(tl.minimum(b_0, b_1), tl.minimum(b_2, b_3)))
    tl.store(p_s + LEAST * S.K, tl.zeros([S.BK], tl.float32) + least, mask=o_k == 0)
    b_0, b_1, b_2, b_3 = tl.exp2(b_0), tl.exp2(b_1), tl.exp2(b_2), tl.exp2(b_3)
    b_one = tl.full([S.BK], 1.0, tl.float32)
    store_four(p_s + BEFORE * S.K, m_k, b_one, b_0, b_0 * b_1, b_0 * b_1 * b_2, S.K)
    store_four(p_s + AFTER * S.K, m_k, b_1 * b_2 * b_3, b_2 * b_3, b_3, b_one, S.K)
    b_zero = tl.zeros([S.BK], tl.float32)
    store_four(p_s + LATE * S.K, m_k, b_zero, b_zero, b_one, b_2, S.K)
    store_four(p_s + EARLY * S.K, m_k, b_1, b_one, b_zero, b_zero, S.K)
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
    """For each row, the vector of its block: BEFORE, AFTER, LATE or EARLY."""
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


@triton.jit
def sums_of_chunk(i_m, i_h, first, rows, g, chunk_decay, sums, S: tl.constexpr):
    p_g = decays_of(g, first, i_h)
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    p_s = sums + i_slot * ROWS * S.K
    store_sums(p_g, p_s, rows, g, S)
    store_block_decays(p_s, chunk_decay + i_slot * S.K, S)
