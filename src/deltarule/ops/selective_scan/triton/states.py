"""The states between the chunks of `selective_scan`, or the gradients there, in two kernels.

Every chunk on its own finds what it makes of a state of zeros, and what it leaves of any other;
then one pass over the chunks of each sequence puts the two together:

    S_end = left * S_start + local        dS_start = left * dS_end + d_local
"""

import triton
import triton.language as tl

from deltarule.ops.runtime.places import first_chunk, sequence_bounds
from deltarule.ops.selective_scan.triton.tokens import (
    Tokens,
    chunk_of_program,
    load_key,
    load_values,
    state_offsets,
    tile_of,
    tiles_without_time,
    transition,
)

# Chunks whose states are fetched before the first is needed.
AHEAD = tl.constexpr(4)


@triton.jit(do_not_specialize=["T", "N"])
def chunk_summary_kernel(
    q, k, v, delta, A, value_log_decay, log_decay, beta, d_o, cu_seqlens, local, left, scale, T, N,
    S: tl.constexpr,
):  # fmt: skip
    """local and left [M, HV, V, K] of one chunk; REVERSE: of the gradients, from its end."""
    i_m, first, tokens = chunk_of_program(cu_seqlens, T, N, S)
    if tokens <= 0:
        return
    at = tile_of(tl.program_id(1), S)
    b_A, b_k, b_q = tiles_without_time(A, k, q, at, S)
    x = Tokens(q, k, v, delta, value_log_decay, log_decay, beta, b_A, b_k, b_q)
    b_s, b_left = tl.zeros([S.BK, S.BV], tl.float32), tl.full([S.BK, S.BV], 1.0, tl.float32)
    for i_g in range(0, tokens, S.G):
        for j in tl.static_range(S.G):
            t = i_g + j
            here = t < tokens
            if S.REVERSE:
                t = tokens - 1 - t
            b_f, b_new = transition(x, first + t, here, at, S)
            if S.REVERSE:
                b_do = load_values(d_o, first + t, here, at, S) * scale
                b_query = load_key(q, x.b_q, first + t, here, at, S.HQ, S)
                b_s = (b_s + b_do * b_query) * b_f
            else:
                b_s = b_s * b_f + b_new
            b_left *= b_f
    place, mask = state_offsets(i_m, at, S)
    tl.store(local + place, b_s, mask=mask)
    tl.store(left + place, b_left, mask=mask)


@triton.jit(do_not_specialize=["T"])
def carry_kernel(before, local, left, after, cu_seqlens, T, S: tl.constexpr):
    """BE of the SIZE entries of one sequence's state, through its chunks; REVERSE: from the last.

    `local` is replaced by the state at each chunk's start (the gradient at its end), `before`
    [N, SIZE] (None: zeros) is what goes in, and `after` what comes out.
    """
    i_n = tl.program_id(0)
    start, length = sequence_bounds(cu_seqlens, i_n, T, S.PACKED)
    i_m = first_chunk(start, i_n, T, S.CT, S.PACKED).to(tl.int64)
    o_e = tl.program_id(1).to(tl.int64) * S.BE + tl.arange(0, S.BE)
    mask = o_e < S.SIZE
    b_s = tl.zeros([S.BE], tl.float32)
    if before is not None:
        b_s = tl.load(before + i_n.to(tl.int64) * S.SIZE + o_e, mask=mask, other=0.0)
    chunks = tl.cdiv(length, S.CT)
    for i_c in range(0, chunks, AHEAD):
        fetched = ()
        for j in tl.static_range(AHEAD):
            here = i_c + j < chunks
            i_slot = i_m + i_c + j
            if S.REVERSE:
                i_slot = i_m + chunks - 1 - i_c - j
            place = i_slot * S.SIZE + o_e
            b_local = tl.load(local + place, mask=mask & here, other=0.0)
            b_left = tl.load(left + place, mask=mask & here, other=1.0)
            fetched = fetched + (b_local, b_left)  # type: ignore[assignment]  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            i_slot = i_m + i_c + j
            if S.REVERSE:
                i_slot = i_m + chunks - 1 - i_c - j
            tl.store(local + i_slot * S.SIZE + o_e, b_s, mask=mask & (i_c + j < chunks))
            b_s = fetched[2 * j + 1] * b_s + fetched[2 * j]
    tl.store(after + i_n.to(tl.int64) * S.SIZE + o_e, b_s, mask=mask)
