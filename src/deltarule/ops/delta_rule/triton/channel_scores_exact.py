"""What the rows of a chunk are to each other, all chunks at once; decay per channel, any erase.

    erase        rows x    columns y    scores sum_c x_ic y_jc decay(j, i]_c
    none         q         k            P
    tied         q, k      k            P, M and of M the correction N
    free         q         b, k         P, P2
    free         a         b, k         L and its correction N, L2, with decay(j, i)

P is scaled and takes columns up to row i (of q: the last row of its token), the others those before
it. The copies that the kernels which follow the chunks read instead of q, k, a and b:

    q' = scale decay[0, i] q    e' = decay[0, i] k (tied)    a' = decay[0, i) a (free)
    y' = decay(j, end] y        and the decay of the chunk, decay[0, end]

A free erase takes two launches, one for the rows q and one for the rows a.
"""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.channel_decay import (
    AFTER,
    BEFORE,
    BLOCK,
    EARLY,
    LATE,
    LEAST,
    ROWS,
    channel_log_decay,
    lead_decay,
    load_sums,
    near_decay,
    next_below,
    of_block,
    rounded,
    store_block_decays,
    store_sums,
    tail_decay,
)
from deltarule.ops.delta_rule.triton.inverse import correction
from deltarule.ops.delta_rule.triton.tiles import (
    BETA,
    SCALINGS,
    inverse_norms,
    load_channels,
    store_copy,
    store_scores,
    store_square,
)
from deltarule.ops.runtime.places import chunk_place


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
def rows_and_columns(
    p_x, p_y, p_k, norm_x, norm_k, o_x, m_x, o_r, m_r, o_k, s_x,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, ERASE: tl.constexpr,
):  # fmt: skip
    """Rows x and x2, columns y and y2 of the channels o_k: see the head of this page."""
    b_x = load_channels(p_x, o_x, m_x, o_k, s_x, K) * norm_x
    b_y2 = load_channels(p_k, o_r, m_r, o_k, H * K, K) * norm_k
    if ERASE == "free":
        b_x2 = b_x
        b_y = load_channels(p_y, o_r, m_r, o_k, HV * K, K)
    else:
        b_x2 = b_y2
        b_y = b_y2
    return b_x, b_x2, b_y, b_y2


@triton.jit
def store_copies(
    q_copy, k_copy, erase, write, i_slot, b_to, b_from, b_x, b_y, b_y2, o_r, o_k, start,
    K: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr,
    ERASE: tl.constexpr, ERASING_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the scaled copies that this launch is for."""
    m_all, m_new = o_r < BT, o_r >= start
    if ERASING_ROWS:
        store_copy(erase, i_slot, o_r, o_k, b_x * b_to, BT, K, m_new)
        store_copy(k_copy, i_slot, o_r, o_k, b_y2 * b_from, BT, K, m_all)
    else:
        m_last = m_new & (o_r % N_STEPS == N_STEPS - 1)
        store_copy(q_copy, i_slot, o_r // N_STEPS, o_k, b_x * b_to, BQ, K, m_last)
        store_copy(write, i_slot, o_r, o_k, b_y * b_from, BT, K, m_all)
        if ERASE == "tied":
            store_copy(erase, i_slot, o_r, o_k, b_y * b_to, BT, K, m_new)
        if N_STEPS * BQ > BT:
            # Rows that no row of the chunk stands for.
            o_q = tl.arange(0, BQ)
            b_zero = tl.zeros([BQ, o_k.shape[0]], tl.float32)
            store_copy(q_copy, i_slot, o_q, o_k, b_zero, BQ, K, o_q >= CT)


@triton.jit
def far_decays(p_s, o_r, o_k, K: tl.constexpr, OWN: tl.constexpr, EXACT: tl.constexpr):
    """From the chunk's start to each row, from it to the end, and the factors of far pairs."""
    b_to = lead_decay(p_s, o_r, o_k, K, OWN)
    b_from = tail_decay(p_s, load_sums(p_s, o_r, o_k, K), o_r, o_k, K, EXACT)
    b_late = b_to * of_block(p_s, LATE, o_r, o_k, K)
    b_early = b_from * of_block(p_s, EARLY, o_r, o_k, K)
    b_to *= of_block(p_s, BEFORE, o_r, o_k, K)
    b_from *= of_block(p_s, AFTER, o_r, o_k, K)
    return b_to, b_from, b_late, b_early


@triton.jit
def add_steep_scores(
    b_s, b_s2, p_g, p_s, p_x, p_y, p_k, norm_x, norm_k, o_x, m_x, o_r, rows, s_x,
    s_decay_t, s_decay_k, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    N_STEPS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, ERASE: tl.constexpr,
    OWN: tl.constexpr, BAR: tl.constexpr,
):  # fmt: skip
    """Add the pairs that no product has: the columns below the bar, against their own block."""
    if tl.load(p_s + LEAST * K) < -BAR:
        # Few channels at a time: this path must not cost the others registers.
        for i_k in range(0, K, BN):
            o_n = i_k + tl.arange(0, BN)
            b_x, b_x2, b_y, b_y2 = rows_and_columns(
                p_x, p_y, p_k, norm_x, norm_k, o_x, m_x, o_r, o_r < rows, o_n, s_x, H, HV, K, ERASE
            )
            b_g = channel_log_decay(p_g, o_r, rows, o_n, s_decay_t, s_decay_k, K, N_STEPS)
            m_steep = load_sums(p_s, o_r, o_n, K) < -BAR
            b_s += near_scores(b_x, tl.where(m_steep, b_y, 0.0), b_g, BT, OWN)
            if ERASE != "none":
                b_s2 += near_scores(b_x2, tl.where(m_steep, b_y2, 0.0), b_g, BT, OWN)
    return b_s, b_s2


@triton.jit
def chunk_scores(
    q, k, a, b, beta, log_decay, q_copy, k_copy, erase, write,
    scores, value_scores, corrections, from_values, scalings, chunk_decay, sums,
    i_m, i_h, first, tokens, start,
    scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    BN: tl.constexpr, ERASE: tl.constexpr, ERASING_ROWS: tl.constexpr, HAS_DECAY: tl.constexpr,
    UNIT_NORM: tl.constexpr, BAR: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head; of what each row reads, only the rows from `start` on."""
    tl.static_assert(BT == 4 * BLOCK)
    OWN: tl.constexpr = not ERASING_ROWS
    rows = tl.minimum(tokens, CT) * N_STEPS
    i_b, i_t, i_key = first // T, first % T, i_h // (HV // H)
    i_slot = i_m.to(tl.int64) * HV + i_h
    o_r = tl.arange(0, BT)
    o_i, o_j, m_r = o_r[:, None], o_r[None, :], o_r < rows
    p_k = k + (first * N_STEPS * H + i_key) * K
    p_y = p_k
    if ERASE == "free":
        p_y = b + (first * HV + i_h) * K
    norm_k = inverse_norms(p_k, o_r, m_r, H * K, K, BC, UNIT_NORM)[:, None]
    if ERASING_ROWS:
        p_x, o_x, m_x, s_x, norm_x = a + (first * HV + i_h) * K, o_r, m_r, HV * K, 1.0
    else:
        # A query takes part as the last row of its token.
        m_x = m_r & (o_r % N_STEPS == N_STEPS - 1)
        p_x, o_x, s_x = q + (first * H + i_key) * K, o_r // N_STEPS, H * K
        norm_x = inverse_norms(p_x, o_x, m_x, H * K, K, BC, UNIT_NORM)[:, None] * scale
    b_s, b_s2 = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    if HAS_DECAY:
        p_g = log_decay + i_b * s_decay_b + i_t * s_decay_t + i_h * s_decay_h
        p_s = sums + i_slot * ROWS * K
        if OWN:
            store_sums(p_g, p_s, rows, s_decay_t, s_decay_k, K, BK, N_STEPS, EXACT)
            store_block_decays(p_s, chunk_decay + i_slot * K, K, BK)
        b_pair, b_pair2 = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
        for i_k in range(0, K, BC):
            o_k = i_k + tl.arange(0, BC)
            b_x, b_x2, b_y, b_y2 = rows_and_columns(
                p_x, p_y, p_k, norm_x, norm_k, o_x, m_x, o_r, m_r, o_k, s_x, H, HV, K, ERASE
            )
            b_lead = load_sums(p_s, o_r, o_k, K)
            b_row, b_near = lead_decay(p_s, o_r, o_k, K, OWN), near_decay(b_lead, BAR)
            b_tail = tail_decay(p_s, b_lead, o_r, o_k, K, EXACT)
            b_s = product(b_x * b_row, b_y * b_near, b_s, PRECISION)
            b_pair = product(b_x * b_row, b_y * b_tail, b_pair, PRECISION)
            if ERASE != "none":
                b_s2 = product(b_x2 * b_row, b_y2 * b_near, b_s2, PRECISION)
                b_pair2 = product(b_x2 * b_row, b_y2 * b_tail, b_pair2, PRECISION)
        m_own, m_pair = o_i // BLOCK == o_j // BLOCK, o_i // 32 == o_j // 32
        b_s = tl.where(m_own, b_s, tl.where(m_pair, b_pair, 0.0))
        b_s2 = tl.where(m_own, b_s2, tl.where(m_pair, b_pair2, 0.0))
    for i_k in range(0, K, BC):
        o_k = i_k + tl.arange(0, BC)
        b_x, b_x2, b_y, b_y2 = rows_and_columns(
            p_x, p_y, p_k, norm_x, norm_k, o_x, m_x, o_r, m_r, o_k, s_x, H, HV, K, ERASE
        )
        b_to, b_from, b_late, b_early = 1.0, 1.0, 1.0, 1.0
        if HAS_DECAY:
            b_to, b_from, b_late, b_early = far_decays(p_s, o_r, o_k, K, OWN, EXACT)
        store_copies(
            q_copy, k_copy, erase, write, i_slot, b_to, b_from, b_x, b_y, b_y2, o_r, o_k, start,
            K, N_STEPS, CT, BT, BQ, ERASE, ERASING_ROWS,
        )  # fmt: skip
        b_s = product(b_x * b_late, b_y * b_early, b_s, PRECISION)
        if ERASE != "none":
            b_s2 = product(b_x2 * b_late, b_y2 * b_early, b_s2, PRECISION)
    if HAS_DECAY:
        b_s, b_s2 = add_steep_scores(
            b_s, b_s2, p_g, p_s, p_x, p_y, p_k, norm_x, norm_k, o_x, m_x, o_r, rows, s_x,
            s_decay_t, s_decay_k, H, HV, K, N_STEPS, BT, BN, ERASE, OWN, BAR,
        )  # fmt: skip
    if ERASING_ROWS:
        # First, for the registers that the inverse needs.
        store_square(from_values, i_slot, tl.where(o_j < o_i, b_s2, 0.0), start, BT)
        b_n = correction(tl.where(o_j < o_i, b_s, 0.0), tl.full([BT], 1.0, tl.float32), BT, MERGE)
        store_square(corrections, i_slot, b_n, start, BT)
    else:
        store_scores(scores, i_slot, o_r, b_s, start, N_STEPS, CT, BT, BQ)
        if ERASE == "free":
            store_scores(value_scores, i_slot, o_r, b_s2, start, N_STEPS, CT, BT, BQ)
        if ERASE == "tied":
            p_beta = beta + i_b * s_beta_b + i_t * N_STEPS * s_beta_t + i_h * s_beta_h
            b_beta = tl.load(p_beta + o_r * s_beta_t, mask=m_r, other=0.0).to(tl.float32)
            b_n = correction(tl.where(o_j < o_i, -b_s2, 0.0), b_beta, BT, MERGE)
            store_square(corrections, i_slot, b_n, start, BT)
            tl.store(scalings + (i_slot * SCALINGS + BETA) * BT + o_r, b_beta)


@triton.jit(do_not_specialize=["T", "N"])
def channel_scores_kernel(
    q, k, a, b, beta, log_decay, cu_seqlens, q_copy, k_copy, erase, write,
    scores, value_scores, corrections, from_values, scalings, chunk_decay, sums,
    scale, T, N, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    BN: tl.constexpr, ERASE: tl.constexpr, ERASING_ROWS: tl.constexpr, HAS_DECAY: tl.constexpr,
    UNIT_NORM: tl.constexpr, PACKED: tl.constexpr, BAR: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """q_copy [M, HV, BQ, K], other copies [M, HV, BT, K], scores [M, HV, BQ or BT, BT].

    ERASING_ROWS is the launch for the rows a. Of the scalings [M, HV, SCALINGS, BT], beta alone.
    """
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
    if tokens <= 0:
        return
    chunk_scores(
        q, k, a, b, beta, log_decay, q_copy, k_copy, erase, write,
        scores, value_scores, corrections, from_values, scalings, chunk_decay, sums,
        i_m, i_h, first, tokens, 0,
        scale, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
        H, HV, K, N_STEPS, CT, BT, BQ, BK, BC, BN, ERASE, ERASING_ROWS, HAS_DECAY, UNIT_NORM,
        BAR, EXACT, PRECISION, MERGE,
    )  # fmt: skip


@triton.jit
def product(b_x, b_y, b_acc, PRECISION: tl.constexpr):
    """x y^T on top of a sum."""
    b_x, b_y = rounded(b_x, PRECISION), rounded(b_y, PRECISION)
    return tl.dot(b_x, tl.trans(b_y), acc=b_acc, input_precision=PRECISION)


# What `even_scores_kernel` leaves over: the rows of chunks before which a channel decays far.
#
# A fixed number of programs go through the numbers of all chunks, and do with the steep ones what
# `channel_scores_kernel` does with any. The sums of a chunk's decays are in a room of the
# program's own, which the next chunk takes over.


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def steep_scores_kernel(
    q, k, beta, log_decay, cu_seqlens, q_copy, erase, write, scores, corrections, scalings,
    chunk_decay, even_rows, sums, chunks,
    scale, T, N, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr,
    CT: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    BN: tl.constexpr, ERASE: tl.constexpr, UNIT_NORM: tl.constexpr, PACKED: tl.constexpr,
    BAR: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The rows that are not even, and `write` and the decay of their chunk; sums [programs, ..]."""
    i_p, count = tl.program_id(0), chunks * HV
    i_x = next_below(even_rows, BT, i_p, count, 1, 1)
    while i_x < count:
        i_m, i_h, even = i_x // HV, i_x % HV, tl.load(even_rows + i_x)
        first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
        # The kernel of any chunk has a room for each, and counts from the first.
        p_s = sums + (i_p.to(tl.int64) - i_x) * ROWS * K
        tl.debug_barrier()
        chunk_scores(
            q, k, None, None, beta, log_decay, q_copy, None, erase, write, scores,
            None, corrections, None, scalings, chunk_decay, p_s,
            i_m, i_h, first, tokens, even, scale, T, s_beta_b, s_beta_t, s_beta_h,
            s_decay_b, s_decay_t, s_decay_h, s_decay_k, H, HV, K, N_STEPS, CT, BT,
            BQ, BK, BC, BN, ERASE, False, True, UNIT_NORM, BAR, EXACT, PRECISION, MERGE,
        )  # fmt: skip
        i_x = next_below(even_rows, BT, i_x + tl.num_programs(0), count, 1, 1)
