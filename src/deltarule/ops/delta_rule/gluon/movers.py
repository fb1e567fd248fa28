"""The roles that move tiles between global and shared memory, a warp each.

The copy engine moves the tiles of whole chunks. Of a last chunk that is none, the tokens after the
sequence's end may be another sequence's, or nobody's: its rows are loaded and stored one by one,
zeros in place of the others.
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
def load_role(
    shared, of, heads, value_heads, K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
    RAGGED: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """q, k and v to their slots: q, k, v are descriptors, and *_rows point at the same tensors."""
    tiles, barriers, place, _ = shared
    q, k, v, q_rows, k_rows, v_rows = of
    QUERIES: gl.constexpr = CHUNK // STEPS
    BYTES: gl.constexpr = (QUERIES * K + CHUNK * (K + PARTS * VALUES)) * 2
    whole = place.chunks
    if RAGGED:
        whole = place.tokens // QUERIES
    for i in range(whole):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        full = barriers.full.index(slot)
        mbarrier.expect(full, BYTES)
        token = place.start.to(gl.int32) + i * QUERIES
        row, column = token * STEPS, place.key_head * K
        tma.async_copy_global_to_shared(k, [row, column], full, tiles.k.index(slot))
        tma.async_copy_global_to_shared(q, [token, column], full, tiles.q.index(slot))
        for part in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                v, [row, (place.value_head * PARTS + part) * VALUES], full,
                tiles.v.index(slot * PARTS + part),
            )  # fmt: skip
    # A condition that is known when it is compiled does not go well with one that is not.
    if RAGGED:  # noqa: SIM102
        if whole < place.chunks:
            slot, phase = whole % SLOTS, (whole // SLOTS) & 1
            mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
            token = place.start + whole * QUERIES
            left = place.tokens - whole * QUERIES
            row, rows = token * STEPS, left * STEPS
            q_rows += (token * heads + place.key_head) * K
            k_rows += (row * heads + place.key_head) * K
            v_rows += (row * value_heads + place.value_head) * (PARTS * VALUES)
            load_rows(k_rows, heads * K, rows, tiles.k.index(slot), CHUNK, K)
            load_rows(q_rows, heads * K, left, tiles.q.index(slot), QUERIES, K)
            for part in gl.static_range(PARTS):
                load_rows(
                    v_rows + part * VALUES, value_heads * (PARTS * VALUES), rows,
                    tiles.v.index(slot * PARTS + part), CHUNK, VALUES,
                )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(barriers.full.index(slot))


@gluon.jit
def load_rows(x, stride, rows, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The first rows of a tile from x on, and zeros."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    o_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(
        tile, x + (o_r * stride + o_c), mask=(o_r < rows) & (o_c < COLUMNS)
    )


@gluon.jit
def store_role(
    shared, o, o_rows, value_heads, PARTS: gl.constexpr, RAGGED: gl.constexpr, SAVE: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """o from shared memory: a descriptor, and a pointer to the same tensor.

    SAVE: that o of a chunk is there is said in the next; before the first there is nothing.
    """
    tiles, barriers, place, _ = shared
    LATER: gl.constexpr = 1 if SAVE else 0
    QUERIES: gl.constexpr = CHUNK // STEPS
    if SAVE:
        for part in gl.static_range(PARTS):
            mbarrier.wait(barriers.written.index(part), 0)
            mbarrier.arrive(barriers.stored.index(part))
    whole = place.chunks
    if RAGGED:
        whole = place.tokens // QUERIES
    for i in range(whole):
        row = place.start.to(gl.int32) + i * QUERIES
        for part in gl.static_range(PARTS):
            mbarrier.wait(barriers.written.index(part), (i & 1) ^ LATER)
            column = (place.value_head * PARTS + part) * VALUES
            tma.async_copy_shared_to_global(o, [row, column], tiles.o.index(part))
        for part in gl.static_range(PARTS):
            tma.store_wait(PARTS - 1 - part)
            mbarrier.arrive(barriers.stored.index(part))
    if RAGGED:  # noqa: SIM102
        if whole < place.chunks:
            row = place.start + whole * QUERIES
            left = place.tokens - whole * QUERIES
            o_rows += (row * value_heads + place.value_head) * (PARTS * VALUES)
            for part in gl.static_range(PARTS):
                mbarrier.wait(barriers.written.index(part), (whole & 1) ^ LATER)
                store_rows(
                    o_rows + part * VALUES, value_heads * (PARTS * VALUES), left,
                    tiles.o.index(part), QUERIES,
                )  # fmt: skip


@gluon.jit
def store_rows(x, stride, rows, tile, ROWS: gl.constexpr):
    """The first rows of a tile of 64 columns to x, eight at a time: a warp has few registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o_r = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    o_c = gl.arange(0, VALUES, gl.SliceLayout(0, LAYOUT))[None, :]
    for first in gl.static_range(0, ROWS, 8):
        eight = tile.slice(first, 8).load(LAYOUT)
        gl.store(x + ((first + o_r) * stride + o_c), eight, mask=first + o_r < rows)
