"""1 / |q| and 1 / |k| of every token, for calls with `normalize_qk`: a role, and a kernel.

Two roles read the tiles that are in shared memory anyway, a row a lane: no sum goes over lanes, and
the swizzle keeps the lanes' 16 bytes in banks of their own. A warp alone takes longer for q and k
than all other roles for the chunk: the one that loads takes q. The kernel is for those that want
the norms before, or again.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltarule.ops.delta_rule.gluon.memory import CHUNK, words_of_square
from deltarule.ops.delta_rule.triton.tiles import EPSILON, inverse_norm

# Columns of a tile that a warp sums up at once: those of a swizzle.
COLUMNS = gl.constexpr(64)
# The upper half of a word.
UPPER = gl.constexpr(-65536)


@gluon.jit
def norm_role(
    shared, K: gl.constexpr, SLOTS: gl.constexpr, RAGGED: gl.constexpr, FORM: gl.constexpr
):
    """One warp; norms of keys, and of queries of a chunk that is not whole, for the gate role."""
    tiles, barriers, place, _ = shared
    STEPS: gl.constexpr = FORM.STEPS
    if FORM.OWN_NORMS:
        for i in range(place.chunks):
            slot, phase = i % SLOTS, (i // SLOTS) & 1
            mbarrier.wait(barriers.full.index(slot), phase)
            leave_norms(tiles.k.index(slot), tiles.norms.index(2 * slot + 1), K, 1)
            if RAGGED:  # noqa: SIM102
                if i == place.tokens // (CHUNK // STEPS):
                    leave_norms(tiles.q.index(slot), tiles.norms.index(2 * slot), K, STEPS)
            mbarrier.arrive(barriers.normed.index(slot))


@gluon.jit
def leave_norms(tile, norms, K: gl.constexpr, TIMES: gl.constexpr):
    """Of a tile's rows, each as often as said; two rows a lane, so that loads overlap with sums."""
    ROWS: gl.constexpr = CHUNK // TIMES
    # Of bfloat16 two numbers a word, each the upper half of a float32: half the instructions.
    PAIRS: gl.constexpr = 2 if tile.dtype == gl.bfloat16 else 1
    WIDTH: gl.constexpr = COLUMNS // PAIRS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8 // PAIRS], [32, 1], [1, 1], [1, 0])
    squares = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    if PAIRS == 2:
        tile = tile._reinterpret(gl.int32, [ROWS, K // 2], words_of_square())
    for column in gl.static_range(0, K // PAIRS, WIDTH):
        x = tile
        if K > COLUMNS:
            x = tile.slice(column, WIDTH, dim=1)
        x = x.load(LAYOUT)
        if PAIRS == 2:
            low, high = x << 16, x & UPPER
            low, high = low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True)
            squares += gl.sum(low * low, 1) + gl.sum(high * high, 1)
        else:
            x = x.to(gl.float32)
            squares += gl.sum(x * x, 1)
    norm = gl.rsqrt(squares + EPSILON)
    if TIMES == 2:
        norm = gl.reshape(gl.join(norm, norm), [CHUNK])
    norms.store(norm)


@triton.jit(do_not_specialize=["rows"])
def inverse_norms_kernel(
    q, k, norms, rows, HEADS: tl.constexpr, STEPS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """norms [B T H, 1 + n] of the rows of q [B, T, H, K] and of the n of k [B, T n, H, K]."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_x, m_r = o_r[:, None] * K + tl.arange(0, K)[None, :], o_r < rows
    b_q = tl.load(q + o_x, mask=m_r[:, None], other=0.0)
    for step in tl.static_range(STEPS):
        if STEPS > 1:
            o_k = (o_r // HEADS * STEPS + step) * HEADS + o_r % HEADS
            o_x = o_k[:, None] * K + tl.arange(0, K)[None, :]
        b_k = tl.load(k + o_x, mask=m_r[:, None], other=0.0)
        if step == 0:
            tl.store(norms + o_r * (1 + STEPS), inverse_norm(b_q), mask=m_r)
        tl.store(norms + o_r * (1 + STEPS) + (1 + step), inverse_norm(b_k), mask=m_r)
