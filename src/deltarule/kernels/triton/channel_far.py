"""The chunks that decay far, which are few: a few programs look through all of them.

`each_chunk` calls what a kernel does with a chunk, by a program for every chunk and head; or, where
`anchored_gradients_kernel` leaves over what decays far, by a fixed number of programs for the heads

    i_x = chunk * HEADS + head      i_p, i_p + programs, i_p + 2 programs, ..

of which every program looks at many together, and stops at those with a decay below FAR.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_decay import LEAST, ROWS
from deltarule.kernels.triton.chunk import chunk_place

# A smaller decay of a chunk in some channel is far: gradients times 2^-100 still have all their
# digits, and keys times 2^100 are far from the largest number.
FAR = tl.constexpr(2.0**-100)
# The same of a block of rows, as a power of 2: one that decays further is steep.
NEAR = tl.constexpr(100.0)
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
    of, given, known, cu_seqlens, chunks, T, N, HEADS: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Call of(i_m, i_h, first, rows, *given) for every chunk of each of HEADS heads, H or HV.

    With the decays of chunks `known` [M, HV, K], for those that decay far in any value head of
    their key head; else the program's own one.
    """
    if known is None:
        i_m, i_h = tl.program_id(0), tl.program_id(1)
        first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
        if tokens > 0:
            of(i_m, i_h, first, tl.minimum(tokens, CT) * N_STEPS, *given)
    else:
        PER: tl.constexpr = HEADS // H
        C: tl.constexpr = HV // H * K
        count = chunks * HEADS
        i_x = next_below(known, FAR, tl.program_id(0), count, PER, C)
        while i_x < count:
            i_m, i_h = i_x // HEADS, i_x % HEADS
            first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
            if tokens > 0:
                of(i_m, i_h, first, tl.minimum(tokens, CT) * N_STEPS, *given)
            i_x = next_below(known, FAR, i_x + tl.num_programs(0), count, PER, C)


@triton.jit
def is_steep(sums, i_m, i_key, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr):
    """Whether in a chunk of any value head of a key head a block of rows decays far."""
    least = 0.0
    for i_g in range(HV // H):
        i_slot = i_m.to(tl.int64) * HV + i_key * (HV // H) + i_g
        least = tl.minimum(least, tl.load(sums + (i_slot * ROWS + LEAST) * K))
    return least < -NEAR
