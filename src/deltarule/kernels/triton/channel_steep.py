"""What `even_scores_kernel` leaves over: the rows of chunks before which a channel decays far.

A fixed number of programs go through the numbers of all chunks, and do with the steep ones what
channel_scores.py does with any. The sums of a chunk's decays are in a room of the program's own,
which the next chunk takes over.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_decay import ROWS
from deltarule.kernels.triton.channel_far import next_below
from deltarule.kernels.triton.channel_scores import chunk_scores
from deltarule.kernels.triton.chunk import chunk_place


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
