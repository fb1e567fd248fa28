"""The role that goes before the state with a decay per channel: scaled q and k, and U.

    M_ij = (k_i up_i) . (k_j near_j)              for j < i, of which U is made (inverse.py)

Those of tokens that decay too far come with their rows of P (channel_pairs.py). It scales half
of the tokens, while the state roles finish the chunk before, and they a quarter each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.delta_rule.gluon.channel_memory import RANGE, decays_of, for_inverse, of_chunk
from deltarule.ops.delta_rule.gluon.channel_pairs import ONE, leave_copies, leave_exact
from deltarule.ops.delta_rule.gluon.inverse import PLAIN, PLAIN_1D, invert, invert_transposed
from deltarule.ops.delta_rule.gluon.memory import BLOCK, CHUNK, grid, product
from deltarule.ops.delta_rule.gluon.score import blocks_of, columns_of, decayed_blocks
from deltarule.ops.runtime.gluon_tiles import barrier


@gluon.jit
def channel_score_role(shared, of, scale, FORM: gl.constexpr):
    """What the state roles wait for, chunk by chunk; `of` as in `leave_exact`."""
    tiles, barriers, place, saved = shared
    DECAY_SLOTS: gl.constexpr = tiles.decays.shape[0]
    for i in range(place.chunks):
        slot, phase = i % FORM.SLOTS, (i // FORM.SLOTS) & 1
        mbarrier.wait(barriers.full.index(slot), phase)
        mbarrier.wait(barriers.decays.index(i % DECAY_SLOTS), (i // DECAY_SLOTS) & 1)
        decays, number = decays_of(tiles, i), place.slot + i * place.value_heads
        if FORM.SAVE and FORM.TIED:
            # What was left here has gone.
            tma.store_wait(0)
            barrier()
        # `write` and P are those of the chunk before until the state roles have done with it.
        before = i + FORM.SLOTS - 1
        empty = barriers.empty.index(before % FORM.SLOTS)
        phase_before = ((before // FORM.SLOTS) & 1) ^ 1
        # No product of P reads `near_low` any more.
        mbarrier.wait(barriers.paired.index(0), (i & 1) ^ 1)
        fast, far = CHUNK + 0 * i, gl.where(least_sum(decays) < -RANGE, 1, 0)
        if far == 1:
            mbarrier.wait(empty, phase_before)
            fast = leave_exact(tiles, slot, decays, of, i * CHUNK, place.tokens, scale, FORM)
        tiles.fast.store(gl.zeros([1], gl.float32, ONE) + fast)
        mbarrier.arrive(barriers.sums.index(0))
        if FORM.SAVE:
            gl.store(saved.fast_rows + number, fast)
        third = leave_copies(shared, slot, decays, number, far, scale, 2 * BLOCK, BLOCK, FORM)
        fourth = leave_copies(shared, slot, decays, number, far, scale, 3 * BLOCK, BLOCK, FORM)
        if far == 0:
            mbarrier.wait(empty, phase_before)
        tiles.write.index(0).slice(2 * BLOCK, BLOCK).store(third)
        tiles.write.index(0).slice(3 * BLOCK, BLOCK).store(fourth)
        fence_async_shared()
        mbarrier.arrive(barriers.copied.index(slot))
        mbarrier.wait(barriers.copied.index(slot), phase)
        if FORM.TIED:
            own = for_inverse(tiles, slot, FORM.SLOTS)
            minus_l_t, minus_m = leave_pairs(tiles, own, slot, fast, i, FORM)
            barrier()
            u = invert(own, slot, slot, invert_transposed(minus_l_t), minus_m, FORM.SAVE)
            tiles.u.index(slot).store(u.to(tiles.u.dtype))
            fence_async_shared()
            mbarrier.arrive(barriers.scored.index(0))
            if FORM.SAVE:
                n = tiles.u.index(slot)
                tma.async_copy_shared_to_global(saved.corrections, [number * CHUNK, 0], n)
    if FORM.SAVE:
        tma.store_wait(0)


@gluon.jit
def least_sum(decays):
    """The least of c_end; every warp looks for itself."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    sums = decays._reinterpret(gl.float32, decays.shape, PLAIN_1D)
    return gl.min(sums.index(CHUNK - 1).load(LAYOUT), 0)


@gluon.jit
def leave_pairs(tiles, own, slot, fast, i, FORM: gl.constexpr):
    """M but its blocks on the diagonal to `rows`, and those as decayed_blocks; all of it [j, i]."""
    LAYOUT: gl.constexpr = product(CHUNK)
    o_j, o_i = grid(CHUNK, CHUNK, LAYOUT)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT)
    k = tiles.k.index(slot).permute((1, 0))
    m = warpgroup_mma(of_chunk(tiles.near, i), k, zero, use_acc=False, is_async=True)
    m = warpgroup_mma(of_chunk(tiles.near_low, i), k, m, is_async=True)
    m = warpgroup_mma_wait(0, deps=(m,))
    if fast < CHUNK:
        exact = tiles.u.index(slot)._reinterpret(gl.float16, [CHUNK, CHUNK], PLAIN)
        m = gl.where(o_i < fast, m, exact.permute((1, 0)).load(LAYOUT).to(gl.float32))
    rest = gl.where(o_j // BLOCK < o_i // BLOCK, m, 0.0)
    own.rows.permute((1, 0)).store(rest.to(gl.float16))
    return decayed_blocks(tiles, slot, blocks_of(columns_of(m)), 1, FORM)
