"""The role that goes before the state with a decay per channel: scaled q and k, P, and T.

    P_ij = scale (q_i up_i) . (k_j near_j)        for j <= i, and 0 for the others
    M_ij = (k_i up_i) . (k_j near_j)              for j < i, of which T is made (inverse.py)

Those of tokens that decay too far come from channel_exact.py. It scales half of the tokens, and the
state roles, which have nothing else to do then, a quarter each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.delta_rule.gluon.channel_copies import leave_copies, leave_sums
from deltarule.ops.delta_rule.gluon.channel_exact import leave_exact
from deltarule.ops.delta_rule.gluon.channel_memory import RANGE
from deltarule.ops.delta_rule.gluon.inverse import PLAIN, below, invert
from deltarule.ops.delta_rule.gluon.memory import BLOCK, CHUNK, barrier, product
from deltarule.ops.delta_rule.gluon.products import score_places
from deltarule.ops.delta_rule.gluon.score import blocks_of, leave_blocks


@gluon.jit
def channel_score_role(shared, of, scale, K: gl.constexpr, SLOTS: gl.constexpr, FORM: gl.constexpr):
    """What the state roles wait for, chunk by chunk; `of` as in `leave_exact`."""
    tiles, barriers, place, _ = shared
    if FORM.TIED:
        LAYOUT: gl.constexpr = product(CHUNK)
        o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
        o_j = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))[None, :]
        on_16, on_32 = below(1), below(2)
        places = score_places(CHUNK, True, False)
    for i in range(place.chunks):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        mbarrier.wait(barriers.full.index(slot), phase)
        mbarrier.wait(barriers.decays.index(0), i & 1)
        least = leave_sums(tiles, slot, K)
        # The single tiles are those of the chunk before until the state roles have done with it.
        before = i + SLOTS - 1
        mbarrier.wait(barriers.empty.index(before % SLOTS), ((before // SLOTS) & 1) ^ 1)
        fast = CHUNK + 0 * i
        if least < -RANGE:
            fast = leave_exact(tiles, slot, of, i * CHUNK, place.tokens, scale, K, FORM)
        mbarrier.arrive(barriers.sums.index(0))
        leave_copies(tiles, slot, K, 2 * BLOCK, FORM)
        leave_copies(tiles, slot, K, 3 * BLOCK, FORM)
        fence_async_shared()
        mbarrier.arrive(barriers.copied.index(slot))
        mbarrier.wait(barriers.copied.index(slot), phase)
        leave_scores(tiles, slot, scale, fast)
        if FORM.TIED:
            leave_pairs(tiles, slot, fast, FORM)
            barrier()
            t = invert(tiles, slot, on_16, on_32, places, i & 1, False)
            tiles.t.index(slot).store(gl.where(o_i == o_j, 1.0, t).to(tiles.t.dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.scored.index(0))


@gluon.jit
def leave_scores(tiles, slot, scale, fast):
    """P, of tokens from `fast` on what is in its memory already."""
    LAYOUT: gl.constexpr = product(CHUNK)
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))[None, :]
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT)
    q, near, low = tiles.q.index(slot), tiles.near, tiles.near_low
    p = warpgroup_mma(q, near.permute((1, 0)), zero, use_acc=False, is_async=True)
    p = warpgroup_mma(q, low.permute((1, 0)), p, is_async=True)
    p = warpgroup_mma_wait(0, deps=(p,))
    # i >= j with what the compiler knows of j on one side alone, as in pairs.py; and a choice,
    # because what is above the diagonal may be infinite.
    lane, known = o_i - (o_j & 6), o_j & 57
    p = gl.where(lane >= known, p, 0.0) * scale
    if fast < CHUNK:
        exact = tiles.p._reinterpret(tiles.p.dtype, [CHUNK, CHUNK], PLAIN).load(LAYOUT)
        p = gl.where(o_i < fast, p, gl.where(lane >= known, exact.to(gl.float32), 0.0))
        barrier()
    tiles.p.store(p.to(tiles.p.dtype))


@gluon.jit
def leave_pairs(tiles, slot, fast, FORM: gl.constexpr):
    """- L of the blocks on the diagonal, at the place of T, and the rest of M in `rows`.

    M is made transposed, [j, i], because the substitution wants the columns of its blocks.
    """
    LAYOUT: gl.constexpr = product(CHUNK)
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))[None, :]
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT)
    k = tiles.k.index(slot).permute((1, 0))
    m = warpgroup_mma(tiles.near, k, zero, use_acc=False, is_async=True)
    m = warpgroup_mma(tiles.near_low, k, m, is_async=True)
    m = warpgroup_mma_wait(0, deps=(m,))
    if fast < CHUNK:
        exact = tiles.t.index(slot)._reinterpret(gl.float16, [CHUNK, CHUNK], PLAIN)
        m = gl.where(o_i < fast, m, exact.permute((1, 0)).load(LAYOUT).to(gl.float32))
    # No other warp's product reads the memory of `rows` any more.
    barrier()
    rest = gl.where(o_j // BLOCK < o_i // BLOCK, m, 0.0)
    tiles.rows.permute((1, 0)).store(rest.to(gl.float16))
    barrier()
    leave_blocks(tiles, slot, blocks_of(m), FORM)
