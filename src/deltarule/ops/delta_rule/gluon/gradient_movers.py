"""The roles that move the tiles of the gradients between global and shared memory, a warp each.

As in the forward (movers.py) the copy engine moves those of whole chunks. A chunk at the end of a
sequence that is not goes row by row, with zeros after its end; what is nobody's is not stored.
Whether there may be such chunks is known when the kernel is compiled (ENDS).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from deltarule.ops.delta_rule.gluon.gradient_memory import pair_of
from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.delta_rule.gluon.movers import finish_rows, load_rows, store_rows


@gluon.jit
def load_role(
    shared, of, rows, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, TIED: gl.constexpr,
    KEPT: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """One warp: every tile to where it is used, in the order in which places become free.

    A chunk that is not whole goes row by row, from addresses in `rows`, with zeros after its end.
    """
    tiles, barriers, work = shared
    q, k, _, _, _, states, d_states = of
    for n in range(work.count * GROUP):
        slot, phase = n % 2, (n // 2) & 1
        at = pair_of(n, work, GROUP, ENDS)
        kept = at.slot if KEPT else at.own
        mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        if ENDS == "whole" or at.left >= CHUNK:
            fetch_values(tiles, barriers, of, at, slot, kept, V, TIED)
        else:
            load_values(tiles, rows, at, slot, kept, work.heads * GROUP, V, TIED)
            finish_rows()
            mbarrier.arrive(barriers.full.index(slot))
        full_d, full_s = barriers.full_d.index(0), barriers.full_s.index(0)
        mbarrier.wait(barriers.empty_d.index(0), (n & 1) ^ 1)
        mbarrier.expect(full_d, V * K * 2)
        tma.async_copy_global_to_shared(d_states, [at.own * V, 0], full_d, tiles.d_states)
        mbarrier.wait(barriers.empty_s.index(0), (n & 1) ^ 1)
        mbarrier.expect(full_s, V * K * 2)
        tma.async_copy_global_to_shared(states, [kept * V, 0], full_s, tiles.states)
        if n % GROUP == 0:
            full_k = barriers.full_k.index(0)
            mbarrier.wait(barriers.empty_k.index(0), ((n // GROUP) & 1) ^ 1)
            if ENDS == "whole" or at.left >= CHUNK:
                fetch_keys(tiles, full_k, q, k, at, K)
            else:
                first = (at.token.to(gl.int64) * work.heads + at.head) * K
                load_rows(rows[0] + first, work.heads * K, at.left, tiles.q, CHUNK, K)
                load_rows(rows[1] + first, work.heads * K, at.left, tiles.k, CHUNK, K)
                finish_rows()
                mbarrier.arrive(full_k)


@gluon.jit
def fetch_values(
    tiles, barriers, of, at, slot, kept, V: gl.constexpr, TIED: gl.constexpr
):  # fmt: skip
    """dO, E and X of a whole chunk."""
    _, _, d_o, errors, d_errors, _, _ = of
    full, row, column = barriers.full.index(slot), at.token, at.value_head * V
    mbarrier.expect(full, CHUNK * V * (6 if TIED else 4))
    tma.async_copy_global_to_shared(d_o, [row, column], full, tiles.d_o.index(slot))
    if TIED:
        x = tiles.d_errors.index(slot)
        tma.async_copy_global_to_shared(d_errors, [at.own * CHUNK, 0], full, x)
        row, column = kept * CHUNK, 0
    tma.async_copy_global_to_shared(errors, [row, column], full, tiles.errors.index(slot))


@gluon.jit
def load_values(
    tiles, rows, at, slot, kept, value_heads, V: gl.constexpr, TIED: gl.constexpr
):  # fmt: skip
    """Of one that is not whole."""
    _, _, d_o, errors, d_errors = rows
    first, stride = (at.token.to(gl.int64) * value_heads + at.value_head) * V, value_heads * V
    load_rows(d_o + first, stride, at.left, tiles.d_o.index(slot), CHUNK, V)
    if TIED:
        x = d_errors + at.own.to(gl.int64) * (CHUNK * V)
        load_rows(x, V, at.left, tiles.d_errors.index(slot), CHUNK, V)
        x = errors + kept.to(gl.int64) * (CHUNK * V)
        load_rows(x, V, at.left, tiles.errors.index(slot), CHUNK, V)
    else:
        load_rows(errors + first, stride, at.left, tiles.errors.index(slot), CHUNK, V)


@gluon.jit
def fetch_keys(tiles, full_k, q, k, at, K: gl.constexpr):
    """q and k of a whole chunk."""
    mbarrier.expect(full_k, CHUNK * K * 4)
    tma.async_copy_global_to_shared(k, [at.token, at.head * K], full_k, tiles.k)
    tma.async_copy_global_to_shared(q, [at.token, at.head * K], full_k, tiles.q)


@gluon.jit
def store_role(
    shared, of, rows, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, VALUES: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """One warp: dv (VALUES) of every value head, dq and dk of every pair; their places are free."""
    tiles, barriers, work = shared
    for n in range(work.count * GROUP):
        slot, at = n % 2, pair_of(n, work, GROUP, ENDS)
        if VALUES:
            mbarrier.wait(barriers.has_values.index(slot), (n // 2) & 1)
            if ENDS == "whole" or at.left >= CHUNK:
                send_values(tiles, of, at, slot, V)
            else:
                heads = work.heads * GROUP
                first = (at.token.to(gl.int64) * heads + at.value_head) * V
                x = tiles.d_errors.index(slot)
                store_rows(rows[2] + first, heads * V, at.left, x, CHUNK, V)
            mbarrier.arrive(barriers.empty.index(slot))
        if n % GROUP == GROUP - 1:
            mbarrier.wait(barriers.has_keys.index(0), (n // GROUP) & 1)
            if ENDS == "whole" or at.left >= CHUNK:
                send_keys(tiles, of, at, K)
            else:
                first = (at.token.to(gl.int64) * work.heads + at.head) * K
                store_rows(rows[0] + first, work.heads * K, at.left, tiles.q, CHUNK, K)
                store_rows(rows[1] + first, work.heads * K, at.left, tiles.k, CHUNK, K)
            mbarrier.arrive(barriers.empty_k.index(0))


@gluon.jit
def send_values(tiles, of, at, slot, V: gl.constexpr):
    """dv of a whole chunk."""
    tma.async_copy_shared_to_global(
        of[2], [at.token, at.value_head * V], tiles.d_errors.index(slot)
    )
    tma.store_wait(0)


@gluon.jit
def send_keys(tiles, of, at, K: gl.constexpr):
    """dq and dk of one."""
    tma.async_copy_shared_to_global(of[0], [at.token, at.head * K], tiles.q)
    tma.async_copy_shared_to_global(of[1], [at.token, at.head * K], tiles.k)
    tma.store_wait(0)
