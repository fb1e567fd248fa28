"""The roles that move the tiles of the gradients between global and shared memory, a warp each.

The copy engine moves them all. Of a chunk that is not whole it moves the rows up to the end of the
sequence: the others are zeros in shared memory, and nobody's in global memory. Whether there may be
such chunks is known when the kernel is compiled (ENDS); tensor_maps.py says how the engine knows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from deltarule.ops.delta_rule.gluon.gradient_memory import pair_of
from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.delta_rule.gluon.movers import framed, place_of_rows, place_of_tile
from deltarule.ops.runtime import tensor_maps

FAR = gl.constexpr(tensor_maps.FAR)


@gluon.jit
def load_role(shared, of, K: gl.constexpr, V: gl.constexpr, FORM: gl.constexpr):
    """One warp: every tile to where it is used, in the order in which places become free."""
    _, _, work = shared
    done = 0
    for n in range(work.count * FORM.GROUP):
        at = pair_of(n, work, FORM)
        if at.left > 0:
            load_tiles(shared, of, at, done, K, V, FORM)
            done += 1


@gluon.jit
def load_tiles(shared, of, at, n, K: gl.constexpr, V: gl.constexpr, FORM: gl.constexpr):
    """The n-th value head that has tokens; with the first of a pair, q and k."""
    GROUP: gl.constexpr = FORM.GROUP
    tiles, barriers, _ = shared
    q, k, d_o, errors, d_errors, states, upper, lower = of
    slot, phase = n % 2, (n // 2) & 1
    kept = at.slot if FORM.KEPT else at.own
    mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
    full, row, column = barriers.full.index(slot), at.token, at.value_head * V
    mbarrier.expect(full, CHUNK * V * (6 if FORM.TIED else 4))
    load(d_o, row, column, at.left, full, tiles.d_o.index(slot), FORM.ENDS)
    if FORM.TIED:
        x = tiles.d_errors.index(slot)
        if not FORM.X_IS_LENT:
            row, column = at.own * CHUNK, 0
        load(d_errors, row, column, at.left, full, x, FORM.ENDS)
        row, column = kept * CHUNK, 0
    load(errors, row, column, at.left, full, tiles.errors.index(slot), FORM.ENDS)
    full_d, full_s = barriers.full_d.index(0), barriers.full_s.index(0)
    mbarrier.wait(barriers.empty_d.index(0), (n & 1) ^ 1)
    mbarrier.expect(full_d, V * K * 2)
    if FORM.D_IS_LENT:
        load_lent(upper, lower, at, full_d, tiles.d_states, K, V)
    else:
        load_state(upper, at.own * V, full_d, tiles.d_states)
    mbarrier.wait(barriers.empty_s.index(0), (n & 1) ^ 1)
    mbarrier.expect(full_s, V * K * 2)
    load_state(states, kept * V, full_s, tiles.states)
    if n % GROUP == 0:
        full_k = barriers.full_k.index(0)
        mbarrier.wait(barriers.empty_k.index(0), ((n // GROUP) & 1) ^ 1)
        mbarrier.expect(full_k, CHUNK * K * 4)
        load(k, at.token, at.head * K, at.left, full_k, tiles.k, FORM.ENDS)
        load(q, at.token, at.head * K, at.left, full_k, tiles.q, FORM.ENDS)


@gluon.jit
def load_lent(upper, lower, at, full, tile, K: gl.constexpr, V: gl.constexpr):
    """D from where its first 64 rows, and the others, lie."""
    for row in gl.static_range(0, V, CHUNK):
        for column in gl.static_range(0, K, CHUNK):
            part = tile.slice(row, CHUNK).slice(column, CHUNK, 1)
            place = [at.token, at.head * K + column]
            tma.async_copy_global_to_shared(lower if row else upper, place, full, part)


@gluon.jit
def store_role(shared, of, K: gl.constexpr, V: gl.constexpr, FORM: gl.constexpr):
    """One warp: dv (VALUES) of every value head, dq and dk of every pair; their places are free."""
    _, _, work = shared
    done = 0
    for n in range(work.count * FORM.GROUP):
        at = pair_of(n, work, FORM)
        if at.left > 0:
            store_tiles(shared, of, at, done, K, V, FORM)
            done += 1


@gluon.jit
def store_tiles(shared, of, at, n, K: gl.constexpr, V: gl.constexpr, FORM: gl.constexpr):
    """The n-th value head that has tokens; after the last of a pair, dq and dk."""
    GROUP: gl.constexpr = FORM.GROUP
    tiles, barriers, _ = shared
    d_q, d_k, d_v = of
    slot = n % 2
    if FORM.VALUES:
        mbarrier.wait(barriers.has_values.index(slot), (n // 2) & 1)
        x = tiles.d_errors.index(slot)
        store(d_v, at.token, at.value_head * V, at.left, x, FORM.ENDS)
        tma.store_wait(0)
        mbarrier.arrive(barriers.empty.index(slot))
    if n % GROUP == GROUP - 1:
        mbarrier.wait(barriers.has_keys.index(0), (n // GROUP) & 1)
        store(d_q, at.token, at.head * K, at.left, tiles.q, FORM.ENDS)
        store(d_k, at.token, at.head * K, at.left, tiles.k, FORM.ENDS)
        tma.store_wait(0)
        mbarrier.arrive(barriers.empty_k.index(0))


@gluon.jit
def load(x, row, column, rows, full, tile, ENDS: gl.constexpr):
    """A tile of x from a row and a column on; so many rows of it are there."""
    place = place_of_chunk(x, row, column, rows, tile.shape[1], ENDS)
    tma.async_copy_global_to_shared(x, place, full, framed(tile, x))


@gluon.jit
def load_state(x, row, full, tile):
    """A state from a row on."""
    place = place_of_rows(x, row, tile.shape[0])
    tma.async_copy_global_to_shared(x, place, full, framed(tile, x))


@gluon.jit
def store(x, row, column, rows, tile, ENDS: gl.constexpr):
    """A tile to where it is in x; so many rows of it are somebody's."""
    place = place_of_chunk(x, row, column, rows, tile.shape[1], ENDS)
    tma.async_copy_shared_to_global(x, place, framed(tile, x))


@gluon.jit
def place_of_chunk(x, row, column, rows, WIDTH: gl.constexpr, ENDS: gl.constexpr):
    """Where a tile of x is, so many rows of which are there."""
    place = place_of_tile(x, row, column, WIDTH)
    if ENDS == "whole":
        found = place
    elif len(place) == 2:
        found = [FAR, row + rows, FAR - rows, column]
    else:
        found = [FAR, row + rows, FAR - rows, place[1], place[2]]
    return found
