"""The exact kernels that go over all chunks, or over those alone that the fast ones flag.

Only the GPU knows which chunks are flagged, mostly few: a few programs look through all of them.
`each_chunk` calls what a kernel does with a chunk: by a program for every chunk and head, or for
flagged chunks alone by a fixed number of programs. Program i_p looks at

    i_x = chunk * HEADS + head      i_p, i_p + programs, i_p + 2 programs, ..

many at once, and stops at those with fewer than BT fast rows.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.channel_decay import ROWS, sums_of_chunk
from deltarule.ops.delta_rule.triton.channel_gradients_exact import (
    Given,
    gradients_of_chunk,
    pairs_of_chunk,
)
from deltarule.ops.delta_rule.triton.channel_scores_exact import Keys, Stored, chunk_scores
from deltarule.ops.delta_rule.triton.channel_tiles import Gates
from deltarule.ops.delta_rule.triton.tiles import Around
from deltarule.ops.runtime.places import chunk_place

# The tokens of all sequences, their number, and that of their chunks.
Row = namedtuple("Row", "cu_seqlens chunks T N")


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
def each_chunk(of, given, row, fast_rows, HEADS: tl.constexpr, S: tl.constexpr):
    """Call of(i_m, i_h, first, rows, *given, S) for every chunk of each of HEADS heads, H or HV.

    With the `fast_rows` [M, HV] of chunks, for those that are flagged in any value head of their
    key head; else the program's own one.
    """
    if fast_rows is None:
        i_m, i_h = tl.program_id(0), tl.program_id(1)
        first, tokens = chunk_place(i_m, row.cu_seqlens, row.T, row.N, S.CT, S.PACKED)
        if tokens > 0:
            of(i_m, i_h, first, tl.minimum(tokens, S.CT) * S.N_STEPS, *given, S)
    else:
        PER: tl.constexpr = HEADS // S.H
        count = row.chunks * HEADS
        i_x = next_below(fast_rows, S.BT, tl.program_id(0), count, PER, S.HV // S.H)
        while i_x < count:
            i_m, i_h = i_x // HEADS, i_x % HEADS
            first, tokens = chunk_place(i_m, row.cu_seqlens, row.T, row.N, S.CT, S.PACKED)
            if tokens > 0:
                of(i_m, i_h, first, tl.minimum(tokens, S.CT) * S.N_STEPS, *given, S)
            i_x = next_below(fast_rows, S.BT, i_x + tl.num_programs(0), count, PER, S.HV // S.H)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def decay_sums_kernel(
    log_decay, cu_seqlens, fast_rows, chunk_decay, sums, chunks, T, N, s_decay_b, s_decay_t,
    s_decay_h, s_decay_k, S: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, ROWS, K] of channel_decay.py, and chunk_decay [M, HV, K]."""
    g = Gates(None, log_decay, T, None, None, None, s_decay_b, s_decay_t, s_decay_h, s_decay_k)
    row = Row(cu_seqlens, chunks, T, N)
    each_chunk(sums_of_chunk, (g, chunk_decay, sums), row, fast_rows, S.HV, S)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def exact_scores_kernel(
    q, k, a, b, beta, log_decay, cu_seqlens, decayed_q, decayed_k, erase, write, scores,
    value_scores, corrections, from_values, scalings, chunk_decay, fast_rows, sums, chunks, scale,
    T, N, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k, S: tl.constexpr,
):  # fmt: skip
    """decayed_q [M, HV, BQ, K], other decayed rows [M, HV, BT, K], scores [M, HV, BQ or BT, BT].

    ERASING_ROWS is the launch for the rows a. The scalings [M, HV, SCALINGS, BT] get beta alone.
    With `fast_rows` the rows after the fast ones, with `write`, decayed_k and the decay of their
    chunk; a program then has one room for the sums of a chunk's decays, sums [programs, ..].
    """
    g = Gates(
        beta, log_decay, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k
    )
    x, free = Keys(q, k, a, b), (decayed_k, value_scores, from_values)
    left = decayed_q, erase, write, scores, corrections, scalings, chunk_decay
    if fast_rows is None:
        i_m, i_h = tl.program_id(0), tl.program_id(1)
        first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
        if tokens <= 0:
            return
        y = Stored(*left, sums, *free)
        chunk_scores(x, y, g, i_m, i_h, first, tokens, 0, scale, not S.ERASING_ROWS, S)
    else:
        i_p, count = tl.program_id(0), chunks * S.HV
        i_x = next_below(fast_rows, S.BT, i_p, count, 1, 1)
        while i_x < count:
            i_m, i_h, fast = i_x // S.HV, i_x % S.HV, tl.load(fast_rows + i_x)
            first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
            # `chunk_scores` counts the rooms from that of the first chunk.
            y = Stored(*left, sums + (i_p.to(tl.int64) - i_x) * ROWS * S.K, *free)
            tl.debug_barrier()
            chunk_scores(x, y, g, i_m, i_h, first, tokens, fast, scale, True, S)
            i_x = next_below(fast_rows, S.BT, i_x + tl.num_programs(0), count, 1, 1)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def pair_gradients_kernel(
    v, beta, cu_seqlens, fast_rows, errors, d_o, d_errors, d_values, pairs, d_v, d_beta, chunks,
    scale, T, N, s_beta_b, s_beta_t, s_beta_h, S: tl.constexpr,
):  # fmt: skip
    """pairs [M, HV, 1, 2 or 4, BT, BT], and d_v and d_beta in the layouts of v and beta."""
    x = Around(v, None, errors, d_o, None, d_errors)
    g = Gates(beta, None, T, s_beta_b, s_beta_t, s_beta_h, None, None, None, None)
    row, given = Row(cu_seqlens, chunks, T, N), (x, g, d_values, pairs, d_v, d_beta, scale)
    each_chunk(pairs_of_chunk, given, row, fast_rows, S.HV, S)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def exact_gradients_kernel(
    q, k, v, a, b, beta, log_decay, cu_seqlens, fast_rows, states, errors, d_o, d_states, d_errors,
    pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, d_log_decay, chunks, scale, T, N, s_beta_b,
    s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k, S: tl.constexpr,
):  # fmt: skip
    """Gradients in the layouts of their tensors; that by log_decay [B, T, HV, K] in float32.

    They are those of all chunks, or of the flagged ones where there are `fast_rows`.
    """
    g = Gates(
        beta, log_decay, T, s_beta_b, s_beta_t, s_beta_h, s_decay_b, s_decay_t, s_decay_h, s_decay_k
    )
    x = Around(v, states, errors, d_o, d_states, d_errors)
    y = Given(pairs, sums, chunk_decay, d_q, d_k, d_a, d_b, d_log_decay, scale)
    row, given = Row(cu_seqlens, chunks, T, N), (Keys(q, k, a, b), x, y, g)
    each_chunk(gradients_of_chunk, given, row, fast_rows, S.H, S)
