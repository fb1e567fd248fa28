"""P of some rows of a chunk, with a decay per channel: a product of scaled copies.

    P_ij = scale (q_i up_i) . (k_j near_j)        for j <= i, and 0 for the others

Rows of tokens that decay too far come from channel_exact.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from deltarule.ops.delta_rule.gluon.channel_memory import of_chunk
from deltarule.ops.delta_rule.gluon.inverse import PLAIN
from deltarule.ops.delta_rule.gluon.memory import CHUNK, product
from deltarule.ops.runtime.gluon_tiles import barrier

# A number that every thread has.
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def leave_scores(
    tiles, slot, i, scale, FIRST: gl.constexpr, ROWS: gl.constexpr, FORM: gl.constexpr
):
    """P of the rows from FIRST on; of tokens that decay too far what is in its memory already."""
    LAYOUT: gl.constexpr = product(ROWS)
    o_i = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    zero = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    fast = gl.sum(tiles.fast.load(ONE), 0).to(gl.int32)
    q = tiles.q.index(slot).slice(FIRST, ROWS).permute((1, 0))
    near = of_chunk(tiles.near, i) if FORM.TIED else tiles.k.index(slot)
    p = warpgroup_mma(near, q, zero, use_acc=False, is_async=True)
    p = warpgroup_mma(of_chunk(tiles.near_low, i), q, p, is_async=True)
    p = warpgroup_mma_wait(0, deps=(p,))
    # i >= j with what the compiler knows of i on one side alone, as in score.py; and a choice,
    # because what is above the diagonal may be infinite.
    lane, known = o_j - (o_i & 6), (o_i & 57) + FIRST
    p = gl.where(known >= lane, p, 0.0) * scale
    if fast < CHUNK:
        exact = tiles.p.index(0)._reinterpret(tiles.p.dtype, [CHUNK, CHUNK], PLAIN)
        exact = exact.slice(FIRST, ROWS).permute((1, 0)).load(LAYOUT).to(gl.float32)
        p = gl.where(o_i + FIRST < fast, p, gl.where(known >= lane, exact, 0.0))
        barrier()
    tiles.p.index(0).slice(FIRST, ROWS).permute((1, 0)).store(p.to(tiles.p.dtype))
