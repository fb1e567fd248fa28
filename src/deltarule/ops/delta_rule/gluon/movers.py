"""The roles that move tiles between global and shared memory, a warp each.

The copy engine moves all tiles. Of a chunk that is not whole it moves the rows up to the end of the
sequence: the others are zeros in shared memory, and nobody's in global memory. Whether there may be
such chunks is known when the kernel is compiled (ENDS); tensor_maps.py says how the engine knows. A
tile may have more columns than a head has channels: then heads are an axis of the tensor, after
whose channels the engine fetches zeros and stores nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES
from deltarule.ops.runtime import tensor_maps

FAR = gl.constexpr(tensor_maps.FAR)


@gluon.jit
def place_of_rows(x, row, ROWS: gl.constexpr, column=0):
    """Where rows of a state are; where states are an axis of x, each has ROWS here."""
    if len(x.block_shape) == 2:
        found = [row, column]
    else:
        found = [row // ROWS, row % ROWS, 0]
    return found


@gluon.jit
def framed(tile, x):
    """A tile with the axes of those of x."""
    if len(x.block_shape) > 2:
        tile = tile._reinterpret(tile.dtype, x.block_shape, x.layout)
    return tile


@gluon.jit
def room(full, empty, phase, size: gl.constexpr):
    """The barrier of a single place, once it is free again, to which so many bytes will come."""
    mbarrier.wait(empty.index(0), phase)
    mbarrier.expect(full.index(0), size)
    return full.index(0)


@gluon.jit
def load_rows(x, row, full, tile, column=0):
    """Of states, or of what else chunks have their own rows of: a tile that is all there."""
    place = place_of_rows(x, row, tile.shape[0], column)
    tma.async_copy_global_to_shared(x, place, full, framed(tile, x))


@gluon.jit
def load(x, row, column, rows, full, tile, ENDS: gl.constexpr, PARTS: gl.constexpr = 1):
    """A tile of x, or of PARTS of one, from a row and a column on; so many rows of it are there."""
    place = place_of_chunk(x, row, column, rows, PARTS * tile.shape[1], ENDS)
    tma.async_copy_global_to_shared(x, place, full, framed(tile, x))


@gluon.jit
def store(x, row, column, rows, tile, ENDS: gl.constexpr, PARTS: gl.constexpr = 1):
    place = place_of_chunk(x, row, column, rows, PARTS * tile.shape[1], ENDS)
    tma.async_copy_shared_to_global(x, place, framed(tile, x))


@gluon.jit
def place_of_chunk(x, row, column, rows, WIDTH: gl.constexpr, ENDS: gl.constexpr):
    """Where a tile of x is, so many rows of which are there.

    Where heads are an axis of x, each has WIDTH columns here.
    """
    found = [row, column]
    if len(x.block_shape) % 2 == 1:
        found = [row, column // WIDTH, column % WIDTH]
    if ENDS != "whole":
        found = [FAR, row + rows, FAR - rows] + found[1:]  # noqa: RUF005
    return found


@gluon.jit
def load_role(shared, of, FORM: gl.constexpr):
    """q, k and v, which are descriptors, to their slots; of decays per channel their logs, too.

    The place of log decays is free as soon as their chunk is scaled: with as many places as q, k
    and v have it is the first of a chunk's, and with one it is the last.
    """
    tiles, _, place, _ = shared
    DECAYS: gl.constexpr = len(of) > 3
    FIRST: gl.constexpr = DECAYS and tiles.decays.shape[0] == FORM.SLOTS
    for i in range(place.chunks):
        if FIRST:
            load_decays(shared, of[3], i, FORM)
        load_chunk(shared, of, i, FORM)
        if DECAYS and not FIRST:
            load_decays(shared, of[3], i, FORM)


@gluon.jit
def load_chunk(shared, of, i, FORM: gl.constexpr):
    tiles, barriers, place, _ = shared
    q, k, v = of[0], of[1], of[2]
    QUERIES: gl.constexpr = CHUNK // FORM.STEPS
    slot, full = i % FORM.SLOTS, barriers.full.index(i % FORM.SLOTS)
    mbarrier.wait(barriers.empty.index(slot), ((i // FORM.SLOTS) & 1) ^ 1)
    mbarrier.expect(full, (QUERIES * FORM.K + CHUNK * (FORM.K + FORM.PARTS * VALUES)) * 2)
    token, left = place.start.to(gl.int32) + i * QUERIES, place.tokens - i * QUERIES
    left = gl.minimum(left, QUERIES)
    row, rows, column = token * FORM.STEPS, left * FORM.STEPS, place.key_head * FORM.K
    load(k, row, column, rows, full, tiles.k.index(slot), FORM.ENDS)
    load(q, token, column, left, full, tiles.q.index(slot), FORM.ENDS)
    for part in gl.static_range(FORM.PARTS):
        column = (place.value_head * FORM.PARTS + part) * VALUES
        x = tiles.v.index(slot * FORM.PARTS + part)
        load(v, row, column, rows, full, x, FORM.ENDS, FORM.PARTS)


@gluon.jit
def load_decays(shared, log_decay, i, FORM: gl.constexpr):
    """Those of a chunk, once all have scaled what lay there."""
    tiles, barriers, place, _ = shared
    DECAY_SLOTS: gl.constexpr = tiles.decays.shape[0]
    before, slot = i + FORM.SLOTS - DECAY_SLOTS, i % DECAY_SLOTS
    mbarrier.wait(barriers.copied.index(before % FORM.SLOTS), ((before // FORM.SLOTS) & 1) ^ 1)
    fetched = barriers.fetched.index(slot)
    mbarrier.expect(fetched, CHUNK * FORM.K * 4)
    token, left = place.start.to(gl.int32) + i * CHUNK, gl.minimum(place.tokens - i * CHUNK, CHUNK)
    column, tile = place.value_head * FORM.K, tiles.decays.index(slot)
    load(log_decay, token, column, left, fetched, tile, FORM.ENDS)


@gluon.jit
def store_role(shared, o, LATE: gl.constexpr, FORM: gl.constexpr):
    """o, a descriptor, from shared memory.

    LATE: that o of a chunk is there is said in the next; before the first there is nothing.
    """
    tiles, barriers, place, _ = shared
    LATER: gl.constexpr = 1 if LATE else 0
    QUERIES: gl.constexpr = CHUNK // FORM.STEPS
    if LATE:
        for part in gl.static_range(FORM.PARTS):
            mbarrier.wait(barriers.written.index(part), 0)
            mbarrier.arrive(barriers.stored.index(part))
    for i in range(place.chunks):
        row, left = place.start.to(gl.int32) + i * QUERIES, place.tokens - i * QUERIES
        left = gl.minimum(left, QUERIES)
        for part in gl.static_range(FORM.PARTS):
            mbarrier.wait(barriers.written.index(part), (i & 1) ^ LATER)
            column = (place.value_head * FORM.PARTS + part) * VALUES
            store(o, row, column, left, tiles.o.index(part), FORM.ENDS, FORM.PARTS)
        for part in gl.static_range(FORM.PARTS):
            tma.store_wait(FORM.PARTS - 1 - part)
            mbarrier.arrive(barriers.stored.index(part))
