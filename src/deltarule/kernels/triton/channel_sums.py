"""The sums of the decays of every chunk, for a backward whose scores did without them."""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_decay import ROWS, store_block_decays, store_sums
from deltarule.kernels.triton.channel_far import each_chunk


@triton.jit
def sums_of_chunk(
    i_m, i_h, first, rows, log_decay, chunk_decay, sums, T, s_decay_b, s_decay_t, s_decay_h,
    s_decay_k,
    HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What `decay_sums_kernel` does with one chunk of one value head."""
    p_g = log_decay + first // T * s_decay_b + first % T * s_decay_t + i_h * s_decay_h
    i_slot = i_m.to(tl.int64) * HV + i_h
    p_s = sums + i_slot * ROWS * K
    store_sums(p_g, p_s, rows, s_decay_t, s_decay_k, K, BK, N_STEPS, EXACT)
    store_block_decays(p_s, chunk_decay + i_slot * K, K, BK)


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def decay_sums_kernel(
    log_decay, cu_seqlens, known, chunk_decay, sums, chunks, T, N, s_decay_b, s_decay_t,
    s_decay_h, s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr,
    BK: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, ROWS, K] as channel_decay.py has them, and chunk_decay [M, HV, K]."""
    each_chunk(
        sums_of_chunk,
        (
            log_decay, chunk_decay, sums, T, s_decay_b, s_decay_t, s_decay_h, s_decay_k,
            HV, K, N_STEPS, BK, EXACT,
        ),
        known, cu_seqlens, chunks, T, N, HV, H, HV, K, N_STEPS, CT, PACKED,
    )  # fmt: skip
