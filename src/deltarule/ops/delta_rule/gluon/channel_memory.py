"""What the roles of the forward with a decay per channel share: tiles and barriers.

Of the sums c_i of a chunk's log decays, to base 2 and from its start to token i, there are

    up_i = 2^(c_i + SHIFT)        near_i = 2^-(c_i + SHIFT)        rest_i = 2^(c_end - c_i)

channel by channel, and a pair's decay is up_i near_j. SHIFT makes half of the exponents positive,
as in triton/channel_scores_fast.py: so both are numbers down to c of -RANGE. Tokens beyond it have
pairs of their own (channel_pairs.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.inverse import PLAIN, PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import CHUNK, GATES, VALUES, straight
from deltarule.ops.runtime.gluon_tiles import new_barrier, square

# Powers of two.
SHIFT, RANGE = gl.constexpr(80.0), gl.constexpr(160.0)
UNSHIFT = gl.constexpr(2.0**-80)
# Roles that add up decays, each of its share of the channels.
SUM_ROLES = gl.constexpr(2)


class ChannelTiles(NamedTuple):
    """Tiles in shared memory; those with SLOTS are of two chunks, the others of one."""

    # [SLOTS, 64, K]: q and k, and in their places q up and k up; without an erase k near.
    q: Any
    k: Any
    # [SLOTS * V / 64, 64, 64].
    v: Any
    # [SLOTS, 64, 64]: U (or N), with an erase; [1, 64, 64]: P.
    u: Any
    p: Any
    # [1, 64, K]: k near as the sum of two numbers of 16 bits, and k rest.
    near: Any
    near_low: Any
    write: Any
    # [V / 64, 64, 64]: o, of the chunk before the one that is being worked out.
    o: Any
    # [1, 64, K] float32, without an erase [SLOTS, 64, K]: log decays, and in their place their
    # sums; [SLOTS, K] float32: 2^c_end.
    decays: Any
    ends: Any
    # [1] float32: tokens of the chunk before the first that decays too far for the fast form.
    fast: Any
    # [SLOTS * GATES, 64] float32.
    gates: Any
    # For the inverse (inverse.py), found for each chunk (`for_inverse`).
    rows: Any


class ChannelBarriers(NamedTuple):
    """Barriers of each slot (the first three), of the single tiles, and of each state role's o."""

    # q, k, v and the gates are there; the state roles have done with all of the chunk.
    full: Any
    empty: Any
    # All have scaled their tokens of q and k, and need the sums of decays no more.
    copied: Any
    # U is there; all state roles have left their rows of P.
    scored: Any
    paired: Any
    # Log decays are there; their sums are; what was left of the chunk before is free, and tokens
    # beyond the range have their pairs.
    fetched: Any
    decays: Any
    sums: Any
    # o of a state role is there; it is in global memory.
    written: Any
    stored: Any


class ChannelSaved(NamedTuple):
    """What a backward is saved from computing again, as triton/channel_stages.py keeps it.

    Of a chunk with the number n the first are rows n V .. or n 64 .. of theirs.
    """

    # Descriptors of [64, V], [64, 64] and [64, 64] a chunk: E, P and N.
    errors: Any
    scores: Any
    corrections: Any
    # Pointers to [V, K], thrice [64, K], [SCALINGS, 64], [K] and a number a chunk: S, q, k up and
    # k rest as they meet the state, of the scalings beta, 2^c_end, and the number of fast tokens.
    states: Any
    decayed_q: Any
    erase: Any
    write: Any
    scalings: Any
    chunk_decay: Any
    fast_rows: Any


@gluon.jit
def new_channel_tiles(
    dtype: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
    TIED: gl.constexpr,
):  # fmt: skip
    """Shared memory for all tiles."""
    SQUARE: gl.constexpr = square()
    q = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, K], SQUARE)
    k = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, K], SQUARE)
    v = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, CHUNK, VALUES], SQUARE)
    p = gl.allocate_shared_memory(dtype, [1, CHUNK, CHUNK], SQUARE)
    near = gl.allocate_shared_memory(dtype, [1, CHUNK, K], SQUARE) if TIED else k
    near_low = gl.allocate_shared_memory(dtype, [1, CHUNK, K], SQUARE)
    write = gl.allocate_shared_memory(dtype, [1, CHUNK, K], SQUARE)
    o = gl.allocate_shared_memory(dtype, [PARTS, CHUNK, VALUES], SQUARE)
    decays = gl.allocate_shared_memory(gl.float32, [1 if TIED else SLOTS, CHUNK, K], straight())
    ends = gl.allocate_shared_memory(gl.float32, [SLOTS, K], PLAIN_1D)
    fast = gl.allocate_shared_memory(gl.float32, [1], PLAIN_1D)
    gates = gl.allocate_shared_memory(gl.float32, [SLOTS * GATES, CHUNK], PLAIN_1D)
    # Before Triton 3.7 a tuple has no None: what is not there is another thing that nobody reads.
    u = p
    if TIED:
        u = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, CHUNK], SQUARE)
    return ChannelTiles(
        q, k, v, u, p, near, near_low, write, o, decays, ends, fast, gates, p
    )  # fmt: skip


@gluon.jit
def new_channel_barriers(PARTS: gl.constexpr, SLOTS: gl.constexpr, TIED: gl.constexpr):
    """All barriers: a slot is full with its tiles and its gates."""
    full, empty = new_barrier(SLOTS, 2), new_barrier(SLOTS, PARTS)
    copied, scored = new_barrier(SLOTS, 1 + PARTS), new_barrier(1, 1)
    paired = new_barrier(1, PARTS)
    fetched = new_barrier(1 if TIED else SLOTS, 1)
    decays, sums = new_barrier(1 if TIED else SLOTS, SUM_ROLES), new_barrier(1, 1)
    written, stored = new_barrier(PARTS, 1), new_barrier(PARTS, 1)
    return ChannelBarriers(
        full, empty, copied, scored, paired, fetched, decays, sums, written, stored
    )  # fmt: skip


@gluon.jit
def decays_of(tiles, i):
    """Log decays of chunk i, or their sums."""
    decays = tiles.decays
    SLOTS: gl.constexpr = decays.shape[0]
    K: gl.constexpr = decays.shape[2]
    return decays.index(i % SLOTS)._reinterpret(gl.float32, [CHUNK, K], PLAIN)


@gluon.jit
def for_inverse(tiles, slot, SLOTS: gl.constexpr):
    """The tiles with `rows` where U of an earlier chunk was, which all roles have done with."""
    u = tiles.u
    rows = u.index((slot + 1) % SLOTS)._reinterpret(gl.float16, [CHUNK, CHUNK], square())
    return ChannelTiles(
        tiles.q, tiles.k, tiles.v, u, tiles.p, tiles.near, tiles.near_low, tiles.write, tiles.o,
        tiles.decays, tiles.ends, tiles.fast, tiles.gates, rows,
    )  # fmt: skip


@gluon.jit
def of_chunk(tile, i):
    """The only tile of [1, ...], by an index that the compiler does not know.

    Of a tile that it knows the operands of products are found before the loop, one by one, and for
    want of registers come back from the L2 cache in every chunk.
    """
    return tile.index(i >> 30)
