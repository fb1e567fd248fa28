"""Scores of the pairs of rows of a chunk, all chunks at once; decay per channel, any erase.

    erase        rows x    columns y    scores sum_c x_ic y_jc decay(j, i]_c
    none         q         k            P
    tied         q, k      k            P, M and of M the correction N
    free         q         b, k         P, P2
    free         a         b, k         L and its correction N, L2, with decay(j, i)

P is scaled and takes columns up to row i (of q: the last row of its token), the others those before
it. What the scans read in place of q, k, a and b:

    q' = scale decay[0, i] q    e' = decay[0, i] k (tied)    a' = decay[0, i) a (free)
    y' = decay(j, end] y        and the decay of the chunk, decay[0, end]

A free erase takes two launches, one for the rows q and one for the rows a.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton import channel_decay as decay
from deltarule.ops.delta_rule.triton import channel_tiles as channels
from deltarule.ops.delta_rule.triton.channel_decay import (
    AFTER,
    BEFORE,
    BLOCK,
    EARLY,
    LATE,
    LEAST,
    ROWS,
)
from deltarule.ops.delta_rule.triton.tiles import SCALING, SCALINGS, correction, store_rows

# Queries, keys and the rows of a free erase.
Keys = namedtuple("Keys", "q k a b")


# What is left of all chunks for the kernels that follow, the last three with a free erase.
Stored = namedtuple(
    "Stored",
    "decayed_q erase write scores corrections scalings chunk_decay sums "
    "decayed_k value_scores from_values",
    defaults=(None, None, None),
)
# Where the rows x, the columns y and k of a chunk begin, their norms, and which rows x has.
Sources = namedtuple("Sources", "p_x p_y p_k norm_x norm_k o_x m_x s_x")


@triton.jit
def near_scores(b_x, b_y, b_g, BT: tl.constexpr, OWN: tl.constexpr):
    """x_i . y_j decay(j, i] pair by pair in the blocks on the diagonal: [BT, BT]."""
    BLOCKS: tl.constexpr = BT // BLOCK
    C: tl.constexpr = b_x.shape[1]
    o_i = tl.arange(0, BLOCK)[None, :, None]
    b_x = tl.reshape(b_x, (BLOCKS, BLOCK, C))
    b_y = tl.reshape(b_y, (BLOCKS, BLOCK, C))
    b_g = tl.reshape(b_g, (BLOCKS, BLOCK, C))
    o_r, o_c = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    same = o_r // BLOCK == o_c // BLOCK
    b_near = tl.zeros([BT, BT], tl.float32)
    b_sum = tl.zeros([BLOCKS, BLOCK, C], tl.float32)
    for i_up in range(BLOCK):
        # The sums after row j gain row j + 1 as j goes up the block.
        j = BLOCK - 1 - i_up
        last = o_i if OWN else o_i - 1
        b_next = tl.sum(tl.where(o_i == j + 1, b_g, 0.0), axis=1)[:, None, :]
        b_sum += tl.where(last > j, b_next, 0.0)
        b_column = tl.sum(tl.where(o_i == j, b_y, 0.0), axis=1)[:, None, :]
        b_pair = tl.reshape(tl.sum(b_x * b_column * tl.exp2(b_sum), axis=2), (BT,))
        b_near = tl.where(same & (o_c % BLOCK == j), b_pair[:, None], b_near)
    return b_near


@triton.jit
def rows_and_columns(e, o_r, m_r, o_k, S: tl.constexpr):
    """Rows x and x2, columns y and y2 of the channels o_k: see the head of this page."""
    b_x = channels.load_channels(e.p_x, e.o_x, e.m_x, o_k, e.s_x, S.K) * e.norm_x
    b_y2 = channels.load_channels(e.p_k, o_r, m_r, o_k, S.H * S.K, S.K) * e.norm_k
    if S.ERASE == "free":
        b_x2 = b_x
        b_y = channels.load_channels(e.p_y, o_r, m_r, o_k, S.HV * S.K, S.K)
    else:
        b_x2 = b_y2
        b_y = b_y2
    return b_x, b_x2, b_y, b_y2


@triton.jit
def store_channels(x, i_slot, o_r, o_k, b_x, ROWS: tl.constexpr, m_r, S: tl.constexpr):
    store_rows(x + i_slot * ROWS * S.K, b_x, o_r, m_r, o_k, S.K, S.K)


@triton.jit
def store_decayed(y, i_slot, b_to, b_from, b_x, b_y, b_y2, o_r, o_k, start, S: tl.constexpr):
    m_all, m_new = o_r < S.BT, o_r >= start
    if S.ERASING_ROWS:
        store_channels(y.erase, i_slot, o_r, o_k, b_x * b_to, S.BT, m_new, S)
        store_channels(y.decayed_k, i_slot, o_r, o_k, b_y2 * b_from, S.BT, m_all, S)
    else:
        m_last, o_t = m_new & (o_r % S.N_STEPS == S.N_STEPS - 1), o_r // S.N_STEPS
        store_channels(y.decayed_q, i_slot, o_t, o_k, b_x * b_to, S.BQ, m_last, S)
        store_channels(y.write, i_slot, o_r, o_k, b_y * b_from, S.BT, m_all, S)
        if S.ERASE == "tied":
            store_channels(y.erase, i_slot, o_r, o_k, b_y * b_to, S.BT, m_new, S)
        if S.N_STEPS * S.BQ > S.BT:
            # Rows that no row of the chunk stands for.
            o_q = tl.arange(0, S.BQ)
            b_zero = tl.zeros([S.BQ, o_k.shape[0]], tl.float32)
            store_channels(y.decayed_q, i_slot, o_q, o_k, b_zero, S.BQ, o_q >= S.CT, S)


@triton.jit
def add_scores_below_bar(b_s, b_s2, p_g, p_s, e, o_r, rows, g, S: tl.constexpr, OWN: tl.constexpr):
    """Add the pairs that no product has: the columns below the bar, against their own block."""
    if tl.load(p_s + LEAST * S.K) < -S.BAR:
        # Few channels at a time: this path must not cost the others registers.
        for i_k in range(0, S.K, S.BN):
            o_n = i_k + tl.arange(0, S.BN)
            b_x, b_x2, b_y, b_y2 = rows_and_columns(e, o_r, o_r < rows, o_n, S)
            b_g = decay.channel_log_decay(p_g, o_r, rows, o_n, g, S)
            m_below = decay.load_sums(p_s, o_r, o_n, S.K) < -S.BAR
            b_s += near_scores(b_x, tl.where(m_below, b_y, 0.0), b_g, S.BT, OWN)
            if S.ERASE != "none":
                b_s2 += near_scores(b_x2, tl.where(m_below, b_y2, 0.0), b_g, S.BT, OWN)
    return b_s, b_s2


@triton.jit
def chunk_scores(
    x, y, g, i_m, i_h, first, tokens, start, scale, SUMS: tl.constexpr, S: tl.constexpr
):
    """One chunk of one value head; of what each row reads, only the rows from `start` on.

    The sums of its decays are made here, with SUMS, or have been.
    """
    tl.static_assert(S.BT == 4 * BLOCK)
    OWN: tl.constexpr = not S.ERASING_ROWS
    rows = tl.minimum(tokens, S.CT) * S.N_STEPS
    i_key = i_h // (S.HV // S.H)
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    o_r = tl.arange(0, S.BT)
    o_i, o_j, m_r = o_r[:, None], o_r[None, :], o_r < rows
    p_k = x.k + (first * S.N_STEPS * S.H + i_key) * S.K
    p_y = p_k
    if S.ERASE == "free":
        p_y = x.b + (first * S.HV + i_h) * S.K
    norm_k = channels.inverse_norms(p_k, o_r, m_r, S)[:, None]
    if S.ERASING_ROWS:
        p_x, o_x, m_x, s_x, norm_x = x.a + (first * S.HV + i_h) * S.K, o_r, m_r, S.HV * S.K, 1.0
    else:
        # A query takes part as the last row of its token.
        m_x = m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
        p_x, o_x, s_x = x.q + (first * S.H + i_key) * S.K, o_r // S.N_STEPS, S.H * S.K
        norm_x = channels.inverse_norms(p_x, o_x, m_x, S)[:, None] * scale
    e = Sources(p_x, p_y, p_k, norm_x, norm_k, o_x, m_x, s_x)
    b_s, b_s2 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    if S.HAS_DECAY:
        p_g = decay.decays_of(g, first, i_h)
        p_s = y.sums + i_slot * ROWS * S.K
        if SUMS:
            decay.store_sums(p_g, p_s, rows, g, S)
            decay.store_block_decays(p_s, y.chunk_decay + i_slot * S.K, S)
        b_pair, b_pair2 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
        for i_k in range(0, S.K, S.BC):
            o_k = i_k + tl.arange(0, S.BC)
            b_x, b_x2, b_y, b_y2 = rows_and_columns(e, o_r, m_r, o_k, S)
            b_lead = decay.load_sums(p_s, o_r, o_k, S.K)
            b_row = decay.lead_decay(p_s, o_r, o_k, S.K, OWN)
            b_near = decay.near_decay(b_lead, S.BAR)
            b_tail = decay.tail_decay(p_s, b_lead, o_r, o_k, S.K, S.EXACT)
            b_s = product(b_x * b_row, b_y * b_near, b_s, S.PRECISION)
            b_pair = product(b_x * b_row, b_y * b_tail, b_pair, S.PRECISION)
            if S.ERASE != "none":
                b_s2 = product(b_x2 * b_row, b_y2 * b_near, b_s2, S.PRECISION)
                b_pair2 = product(b_x2 * b_row, b_y2 * b_tail, b_pair2, S.PRECISION)
        m_own, m_pair = o_i // BLOCK == o_j // BLOCK, o_i // 32 == o_j // 32
        b_s = tl.where(m_own, b_s, tl.where(m_pair, b_pair, 0.0))
        b_s2 = tl.where(m_own, b_s2, tl.where(m_pair, b_pair2, 0.0))
    for i_k in range(0, S.K, S.BC):
        o_k = i_k + tl.arange(0, S.BC)
        b_x, b_x2, b_y, b_y2 = rows_and_columns(e, o_r, m_r, o_k, S)
        b_to, b_from, b_late, b_early = 1.0, 1.0, 1.0, 1.0
        if S.HAS_DECAY:
            # Decays from the chunk's start to each row and on to its end; factors of level 2.
            b_to = decay.lead_decay(p_s, o_r, o_k, S.K, OWN)
            b_lead = decay.load_sums(p_s, o_r, o_k, S.K)
            b_from = decay.tail_decay(p_s, b_lead, o_r, o_k, S.K, S.EXACT)
            b_late = b_to * decay.of_block(p_s, LATE, o_r, o_k, S.K)
            b_early = b_from * decay.of_block(p_s, EARLY, o_r, o_k, S.K)
            b_to *= decay.of_block(p_s, BEFORE, o_r, o_k, S.K)
            b_from *= decay.of_block(p_s, AFTER, o_r, o_k, S.K)
        store_decayed(y, i_slot, b_to, b_from, b_x, b_y, b_y2, o_r, o_k, start, S)
        b_s = product(b_x * b_late, b_y * b_early, b_s, S.PRECISION)
        if S.ERASE != "none":
            b_s2 = product(b_x2 * b_late, b_y2 * b_early, b_s2, S.PRECISION)
    if S.HAS_DECAY:
        b_s, b_s2 = add_scores_below_bar(b_s, b_s2, p_g, p_s, e, o_r, rows, g, S, OWN)
    if S.ERASING_ROWS:
        # First, for the registers that the inverse needs.
        channels.store_square(y.from_values, i_slot, tl.where(o_j < o_i, b_s2, 0.0), start, S.BT)
        b_one = tl.full([S.BT], 1.0, tl.float32)
        b_n = correction(tl.where(o_j < o_i, b_s, 0.0), b_one, S.BT, S.MERGE)
        channels.store_square(y.corrections, i_slot, b_n, start, S.BT)
    else:
        channels.store_scores(y.scores, i_slot, o_r, b_s, start, S)
        if S.ERASE == "free":
            channels.store_scores(y.value_scores, i_slot, o_r, b_s2, start, S)
        if S.ERASE == "tied":
            b_beta = channels.load_beta(g, first, i_h, o_r, m_r, S)
            b_n = correction(tl.where(o_j < o_i, -b_s2, 0.0), b_beta, S.BT, S.MERGE)
            channels.store_square(y.corrections, i_slot, b_n, start, S.BT)
            tl.store(y.scalings + (i_slot * SCALINGS + SCALING.BETA) * S.BT + o_r, b_beta)


@triton.jit
def product(b_x, b_y, b_acc, PRECISION: tl.constexpr):
    b_x, b_y = decay.rounded(b_x, PRECISION), decay.rounded(b_y, PRECISION)
    return tl.dot(b_x, tl.trans(b_y), acc=b_acc, input_precision=PRECISION)
