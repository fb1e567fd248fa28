"""The sums of the decays of every chunk, for a backward whose scores did without them."""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_anchored import is_far
from deltarule.kernels.triton.channel_decay import ROWS, store_block_decays, store_sums
from deltarule.kernels.triton.chunk import chunk_place


@triton.jit(do_not_specialize=["T", "N"])
def decay_sums_kernel(
    log_decay, cu_seqlens, known, chunk_decay, sums, T, N, s_decay_b, s_decay_t, s_decay_h,
    s_decay_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr,
    BK: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """sums [M, HV, ROWS, K] as channel_decay.py has them, and chunk_decay [M, HV, K]."""
    i_m, i_h = tl.program_id(0), tl.program_id(1)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
    if tokens <= 0:
        return
    if known is not None:  # noqa: SIM102 - a choice at compile time
        if not is_far(known, i_m, i_h // (HV // H), H, HV, K):
            return
    rows = tl.minimum(tokens, CT) * N_STEPS
    p_g = log_decay + first // T * s_decay_b + first % T * s_decay_t + i_h * s_decay_h
    i_slot = i_m.to(tl.int64) * HV + i_h
    p_s = sums + i_slot * ROWS * K
    store_sums(p_g, p_s, rows, s_decay_t, s_decay_k, K, BK, N_STEPS, EXACT)
    store_block_decays(p_s, chunk_decay + i_slot * K, K, BK)
