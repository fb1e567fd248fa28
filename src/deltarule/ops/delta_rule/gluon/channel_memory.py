"""What the roles of the forward with a decay per channel share: tiles and barriers.

Of the sums c_i of a chunk's log decays, to base 2 and from its start to token i, there are

    up_i = 2^(c_i + SHIFT)        near_i = 2^-(c_i + SHIFT)        rest_i = 2^(c_end - c_i)

channel by channel, and a pair's decay is up_i near_j. SHIFT makes half of the exponents positive,
as in triton/channel_scores_fast.py: so both are numbers down to c of -RANGE. Tokens beyond it have
pairs of their own (channel_pairs.py).
"""

from collections import namedtuple

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


# Tiles in shared memory; those with SLOTS are of two chunks, the others of one.
ChannelTiles = namedtuple(
    "ChannelTiles",
    # [SLOTS, 64, K]: q and k, and in their places q up and k up; without an erase k near.
    # [SLOTS * V / 64, 64, 64]: v.
    "q k v "
    # [SLOTS, 64, 64]: U (or N), with an erase; [1, 64, 64]: P.
    "u p "
    # [1, 64, K]: k near as the sum of two numbers of 16 bits, and k rest.
    "near near_low write "
    # [V / 64, 64, 64]: o, of the chunk before the one that is being worked out.
    "o "
    # [1, 64, K] float32, without an erase [SLOTS, 64, K]: log decays, and in their place their
    # sums; [SLOTS, K] float32: 2^c_end.
    "decays ends "
    # [1] float32: tokens of the chunk before the first that decays too far for the fast form.
    "fast "
    # [SLOTS * GATES, 64] float32.
    "gates",
)

# What the inverse of a chunk is made of, and in.
InverseTiles = namedtuple("InverseTiles", "u gates rows")

# Barriers of each slot (the first three), of the single tiles, and of each state role's o.
ChannelBarriers = namedtuple(
    "ChannelBarriers",
    # q, k, v and the gates are there; the state roles have done with all of the chunk.
    "full empty "
    # All have scaled their tokens of q and k, and need the sums of decays no more.
    "copied "
    # U is there; all state roles have left their rows of P.
    "scored paired "
    # Log decays are there; their sums are; what was left of the chunk before is free, and tokens
    # beyond the range have their pairs.
    "fetched decays sums "
    # o of a state role is there; it is in global memory.
    "written stored",
)

# What a backward is saved from computing again, as triton/channel_stages.py keeps it.
#
# Of a chunk with the number n the first are rows n V .. or n 64 .. of theirs.
ChannelSaved = namedtuple(
    "ChannelSaved",
    # Descriptors of [64, V], [64, 64] and [64, 64] a chunk: E, P and N.
    "errors scores corrections "
    # Pointers to [V, K], thrice [64, K], [SCALINGS, 64], [K] and a number a chunk: S, q, k up and
    # k rest as they meet the state, of the scalings beta, 2^c_end, and the number of fast tokens.
    "states decayed_q erase write scalings chunk_decay fast_rows",
)


@gluon.jit
def new_channel_tiles(dtype: gl.constexpr, FORM: gl.constexpr):
    """Shared memory for all tiles."""
    SQUARE: gl.constexpr = square()
    q = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, FORM.K], SQUARE)
    k = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, FORM.K], SQUARE)
    v = gl.allocate_shared_memory(dtype, [FORM.SLOTS * FORM.PARTS, CHUNK, VALUES], SQUARE)
    p = gl.allocate_shared_memory(dtype, [1, CHUNK, CHUNK], SQUARE)
    near = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.K], SQUARE) if FORM.TIED else k
    near_low = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.K], SQUARE)
    write = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.K], SQUARE)
    o = gl.allocate_shared_memory(dtype, [FORM.PARTS, CHUNK, VALUES], SQUARE)
    decays = gl.allocate_shared_memory(
        gl.float32, [1 if FORM.TIED else FORM.SLOTS, CHUNK, FORM.K], straight()
    )
    ends = gl.allocate_shared_memory(gl.float32, [FORM.SLOTS, FORM.K], PLAIN_1D)
    fast = gl.allocate_shared_memory(gl.float32, [1], PLAIN_1D)
    gates = gl.allocate_shared_memory(gl.float32, [FORM.SLOTS * GATES, CHUNK], PLAIN_1D)
    # Before Triton 3.7 a tuple has no None: what is not there is another thing that nobody reads.
    u = p
    if FORM.TIED:
        u = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, CHUNK], SQUARE)
    return ChannelTiles(q, k, v, u, p, near, near_low, write, o, decays, ends, fast, gates)


@gluon.jit
def new_channel_barriers(FORM: gl.constexpr):
    """All barriers: a slot is full with its tiles and its gates."""
    full, empty = new_barrier(FORM.SLOTS, 2), new_barrier(FORM.SLOTS, FORM.PARTS)
    copied, scored = new_barrier(FORM.SLOTS, 1 + FORM.PARTS), new_barrier(1, 1)
    paired = new_barrier(1, FORM.PARTS)
    fetched = new_barrier(1 if FORM.TIED else FORM.SLOTS, 1)
    decays, sums = new_barrier(1 if FORM.TIED else FORM.SLOTS, SUM_ROLES), new_barrier(1, 1)
    written, stored = new_barrier(FORM.PARTS, 1), new_barrier(FORM.PARTS, 1)
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
    """What the inverse takes, with `rows` where U of an earlier chunk was, which is done with."""
    u = tiles.u
    rows = u.index((slot + 1) % SLOTS)._reinterpret(gl.float16, [CHUNK, CHUNK], square())
    return InverseTiles(u, tiles.gates, rows)


@gluon.jit
def of_chunk(tile, i):
    """The only tile of [1, ...], by an index that the compiler does not know.

    Of a tile that it knows the operands of products are found before the loop, one by one, and for
    want of registers come back from the L2 cache in every chunk.
    """
    return tile.index(i >> 30)
