"""The roles that move tiles between global and shared memory, a warp each.

The copy engine moves the tiles of whole chunks. Of a last chunk that is none, the tokens after the
sequence's end may be another sequence's, or nobody's: its rows are loaded and stored one by one,
zeros in place of the others. A tile may have more columns than a head has channels: then heads are
an axis of the tensor, after whose channels the engine fetches zeros and stores nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES


@gluon.jit
def place_of_tile(x, row, column, WIDTH: gl.constexpr):
    """Where a tile of x is; where heads are an axis of x, each has WIDTH columns here."""
    if len(x.block_shape) % 2 == 0:
        found = [row, column]
    else:
        found = [row, column // WIDTH, column % WIDTH]
    return found


@gluon.jit
def place_of_rows(x, row, ROWS: gl.constexpr):
    """Where rows of a state are; where states are an axis of x, each has ROWS here."""
    if len(x.block_shape) == 2:
        found = [row, 0]
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
def load_role(
    shared, of, heads, K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """q, k and v to their slots: q, k, v are descriptors, and *_rows point at the same tensors."""
    tiles, barriers, place, _ = shared
    KEYS: gl.constexpr = FORM.KEYS
    STEPS: gl.constexpr = FORM.STEPS
    WIDTH: gl.constexpr = FORM.WIDTH
    q, k, v, q_rows, k_rows, v_rows = of
    QUERIES: gl.constexpr = CHUNK // STEPS
    BYTES: gl.constexpr = (QUERIES * K + CHUNK * (K + PARTS * VALUES)) * 2
    whole = place.chunks
    if FORM.RAGGED:
        whole = place.tokens // QUERIES
    for i in range(whole):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        full = barriers.full.index(slot)
        mbarrier.expect(full, BYTES)
        token = place.start.to(gl.int32) + i * QUERIES
        row, column = token * STEPS, place.key_head * K
        at = place_of_tile(k, row, column, K)
        tma.async_copy_global_to_shared(k, at, full, framed(tiles.k.index(slot), k))
        at = place_of_tile(q, token, column, K)
        tma.async_copy_global_to_shared(q, at, full, framed(tiles.q.index(slot), q))
        for part in gl.static_range(PARTS):
            at = place_of_tile(v, row, (place.value_head * PARTS + part) * VALUES, PARTS * VALUES)
            x = framed(tiles.v.index(slot * PARTS + part), v)
            tma.async_copy_global_to_shared(v, at, full, x)
    # A condition that is known when it is compiled does not go well with one that is not.
    if FORM.RAGGED:  # noqa: SIM102
        if whole < place.chunks:
            slot, phase = whole % SLOTS, (whole // SLOTS) & 1
            mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
            token = place.start + whole * QUERIES
            left = place.tokens - whole * QUERIES
            row, rows = token * STEPS, left * STEPS
            q_rows += (token * heads + place.key_head) * KEYS
            k_rows += (row * heads + place.key_head) * KEYS
            v_rows += (row * place.value_heads + place.value_head) * WIDTH
            load_rows(k_rows, heads * KEYS, rows, tiles.k.index(slot), CHUNK, K, KEYS)
            load_rows(q_rows, heads * KEYS, left, tiles.q.index(slot), QUERIES, K, KEYS)
            for part in gl.static_range(PARTS):
                load_rows(
                    v_rows + part * VALUES, place.value_heads * WIDTH, rows,
                    tiles.v.index(slot * PARTS + part), CHUNK, VALUES, WIDTH - part * VALUES,
                )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(barriers.full.index(slot))


@gluon.jit
def load_rows(
    x, stride, rows, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, THERE: gl.constexpr
):  # fmt: skip
    """The first rows of a tile from x on, of the columns that are THERE, and zeros."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    o_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(
        tile, x + (o_r * stride + o_c), mask=(o_r < rows) & (o_c < THERE)
    )


@gluon.jit
def store_role(shared, o, o_rows, PARTS: gl.constexpr, FORM: gl.constexpr):
    """o from shared memory: a descriptor, and a pointer to the same tensor.

    SAVE: that o of a chunk is there is said in the next; before the first there is nothing.
    """
    tiles, barriers, place, _ = shared
    LATER: gl.constexpr = 1 if FORM.SAVE else 0
    QUERIES: gl.constexpr = CHUNK // FORM.STEPS
    WIDTH: gl.constexpr = FORM.WIDTH
    if FORM.SAVE:
        for part in gl.static_range(PARTS):
            mbarrier.wait(barriers.written.index(part), 0)
            mbarrier.arrive(barriers.stored.index(part))
    whole = place.chunks
    if FORM.RAGGED:
        whole = place.tokens // QUERIES
    for i in range(whole):
        row = place.start.to(gl.int32) + i * QUERIES
        for part in gl.static_range(PARTS):
            mbarrier.wait(barriers.written.index(part), (i & 1) ^ LATER)
            column = (place.value_head * PARTS + part) * VALUES
            at = place_of_tile(o, row, column, PARTS * VALUES)
            tma.async_copy_shared_to_global(o, at, framed(tiles.o.index(part), o))
        for part in gl.static_range(PARTS):
            tma.store_wait(PARTS - 1 - part)
            mbarrier.arrive(barriers.stored.index(part))
    if FORM.RAGGED:  # noqa: SIM102
        if whole < place.chunks:
            row = place.start + whole * QUERIES
            left = place.tokens - whole * QUERIES
            o_rows += (row * place.value_heads + place.value_head) * WIDTH
            for part in gl.static_range(PARTS):
                mbarrier.wait(barriers.written.index(part), (whole & 1) ^ LATER)
                store_rows(
                    o_rows + part * VALUES, place.value_heads * WIDTH, left, tiles.o.index(part),
                    QUERIES, WIDTH - part * VALUES,
                )  # fmt: skip


@gluon.jit
def store_rows(x, stride, rows, tile, ROWS: gl.constexpr, THERE: gl.constexpr):
    """The first rows of a tile of 64 columns to x, eight at a time: a warp has few registers.

    Of the columns those that are THERE.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o_r = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    o_c = gl.arange(0, VALUES, gl.SliceLayout(0, LAYOUT))[None, :]
    for first in gl.static_range(0, ROWS, 8):
        eight = tile.slice(first, 8).load(LAYOUT)
        there = first + o_r < rows
        if THERE < VALUES:
            there = there & (o_c < THERE)
        gl.store(x + ((first + o_r) * stride + o_c), eight, mask=there)
