"""The role that keeps 64 rows of a head's state S [V, K] where each channel decays by its own.

    W = beta (V - (S (k up)^T)^T 2^-SHIFT)        X = T W
    O = scale (S (q up)^T)^T 2^-SHIFT + P X        S <- S Diag(2^c_end) + X^T (k rest)

with T of the score role (channel_score.py), and q and k scaled by all of them; without an erase
X = V. Each role makes its share of the rows of P (channel_pairs.py). All is transposed, as in
state.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.delta_rule.gluon.channel_copies import leave_copies
from deltarule.ops.delta_rule.gluon.channel_memory import UNSHIFT, of_chunk
from deltarule.ops.delta_rule.gluon.channel_pairs import leave_scores
from deltarule.ops.delta_rule.gluon.memory import BETA, BLOCK, CHUNK, ERASE, GATES, VALUES, product


@gluon.jit
def channel_state_role(
    shared, states, PART: gl.constexpr, PARTS: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Rows 64 PART .. of the state; o of every chunk to shared memory; the final state."""
    tiles, barriers, place, _ = shared
    initial_state, final_state, scale = states
    STATE: gl.constexpr = product(K)
    TOKENS: gl.constexpr = product(CHUNK)
    ROWS: gl.constexpr = CHUNK // PARTS
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    dtype: gl.constexpr = tiles.q.dtype
    o_v = PART * VALUES + gl.arange(0, VALUES, gl.SliceLayout(1, STATE))
    o_s = o_v[:, None] * K + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    if FORM.INITIAL:
        s = gl.load(initial_state + o_s)
    else:
        s = gl.zeros([VALUES, K], gl.float32, STATE)
    zero, read = gl.zeros([VALUES, CHUNK], gl.float32, TOKENS), scale * UNSHIFT
    for i in range(place.chunks):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        gate = slot * GATES
        mbarrier.wait(barriers.full.index(slot), phase)
        mbarrier.wait(barriers.sums.index(0), i & 1)
        decays = tiles.decays.index(i % tiles.decays.shape[0])
        rest = leave_copies(tiles, slot, decays, K, PART * BLOCK, FORM)
        before = i + SLOTS - 1
        mbarrier.wait(barriers.empty.index(before % SLOTS), ((before // SLOTS) & 1) ^ 1)
        tiles.write.index(0).slice(PART * BLOCK, BLOCK).store(rest)
        fence_async_shared()
        mbarrier.arrive(barriers.copied.index(slot))
        left = gl.convert_layout(s.to(dtype), OF_TOKENS)
        v = tiles.v.index(slot * PARTS + PART).permute((1, 0)).load(TOKENS)
        mbarrier.wait(barriers.copied.index(slot), phase)
        leave_scores(tiles, slot, i, scale, PART * ROWS, ROWS, FORM)
        fence_async_shared()
        mbarrier.arrive(barriers.paired.index(0))
        q, k = tiles.q.index(slot).permute((1, 0)), tiles.k.index(slot).permute((1, 0))
        o = warpgroup_mma(left, q, zero, use_acc=False, is_async=True)
        if FORM.TIED:
            erased = warpgroup_mma(left, k, zero, use_acc=False, is_async=True)
            o = warpgroup_mma_wait(1, deps=(o,))
            o = o * read
            erased = warpgroup_mma_wait(0, deps=(erased,))
            erased *= tiles.gates.index(gate + ERASE).load(TOKEN)[None, :]
            beta = tiles.gates.index(gate + BETA).load(TOKEN)[None, :]
            x = v.to(gl.float32) * beta - erased
            right = gl.convert_layout(x.to(dtype), OF_TOKENS)
            mbarrier.wait(barriers.scored.index(0), i & 1)
            t = tiles.t.index(slot).permute((1, 0))
            x = warpgroup_mma(right, t, zero, use_acc=False, is_async=True)
            s = s * tiles.ends.index(slot).load(gl.SliceLayout(0, STATE))[None, :]
            x = warpgroup_mma_wait(0, deps=(x,))
            low = x.to(dtype)
        else:
            s = s * tiles.ends.index(slot).load(gl.SliceLayout(0, STATE))[None, :]
            o = warpgroup_mma_wait(0, deps=(o,))
            o = o * read
            low = v
        mbarrier.wait(barriers.paired.index(0), i & 1)
        s = warpgroup_mma(
            gl.convert_layout(low, OF_STATE), of_chunk(tiles.write, i), s, is_async=True
        )
        p = of_chunk(tiles.p, i).permute((1, 0))
        o = warpgroup_mma(gl.convert_layout(low, OF_TOKENS), p, o, is_async=True)
        s, o = warpgroup_mma_wait(0, deps=(s, o))
        mbarrier.arrive(barriers.empty.index(slot))
        mbarrier.wait(barriers.stored.index(PART), (i & 1) ^ 1)
        tiles.o.index(PART).permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.written.index(PART))
    gl.store(final_state + o_s, s)
