"""The role that keeps 64 rows of a head's state S [V, K] where each channel decays by its own.

    W = beta (V - (S (k up)^T)^T 2^-SHIFT)        X = W + U W
    O = scale (S (q up)^T)^T 2^-SHIFT + P X        S <- S Diag(2^c_end) + X^T (k rest)

or with SAVE, as in state.py, E = F + N beta F of F = V - (S (k up)^T)^T 2^-SHIFT and X = beta E,
with U or N of the score role (channel_score.py), and q and k scaled by all of them; without an
erase X = V. Each role makes its share of the rows of P (channel_pairs.py). All is transposed, as
in state.py.
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

from deltarule.ops.delta_rule.gluon.channel_memory import UNSHIFT, decays_of, of_chunk
from deltarule.ops.delta_rule.gluon.channel_pairs import ONE, leave_copies, leave_scores
from deltarule.ops.delta_rule.gluon.memory import (
    CHUNK,
    GATE,
    GATES,
    VALUES,
    grid,
    product,
    rows_of_state,
)
from deltarule.ops.delta_rule.gluon.state import widened
from deltarule.ops.runtime.gluon_tiles import barrier

# [64, K] of S with eight channels a lane: the numbers of a product, moved between four lanes.
ROWS_OF_STATE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128],
    )
)  # fmt: skip


@gluon.jit
def channel_state_role(shared, states, PART: gl.constexpr, FORM: gl.constexpr):
    """Rows 64 PART .. of the state; o of every chunk to shared memory; the final state."""
    tiles, barriers, place, saved = shared
    initial_state, final_state, scale = states
    STATE: gl.constexpr = product(FORM.K)
    TOKENS: gl.constexpr = product(CHUNK)
    ROWS: gl.constexpr = CHUNK // FORM.PARTS
    SCALED: gl.constexpr = CHUNK // (2 * FORM.PARTS)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    dtype: gl.constexpr = tiles.q.dtype
    o_s, _ = rows_of_state(PART * VALUES, VALUES, FORM.K, FORM.PARTS * VALUES, FORM, STATE)
    if FORM.INITIAL:
        s = gl.load(initial_state + o_s)
    else:
        s = gl.zeros([VALUES, FORM.K], gl.float32, STATE)
    zero, read = gl.zeros([VALUES, CHUNK], gl.float32, TOKENS), scale * UNSHIFT
    for i in range(place.chunks):
        slot, phase = i % FORM.SLOTS, (i // FORM.SLOTS) & 1
        gate, number = slot * GATES, place.slot + i * place.value_heads
        mbarrier.wait(barriers.full.index(slot), phase)
        mbarrier.wait(barriers.sums.index(0), i & 1)
        decays = decays_of(tiles, i)
        far = gl.where(gl.sum(tiles.fast.load(ONE), 0) < CHUNK, 1, 0)
        rest = leave_copies(shared, slot, decays, number, far, scale, PART * SCALED, SCALED, FORM)
        before = i + FORM.SLOTS - 1
        mbarrier.wait(barriers.empty.index(before % FORM.SLOTS), ((before // FORM.SLOTS) & 1) ^ 1)
        tiles.write.index(0).slice(PART * SCALED, SCALED).store(rest)
        fence_async_shared()
        mbarrier.arrive(barriers.copied.index(slot))
        left = gl.convert_layout(s.to(dtype), OF_TOKENS)
        v = tiles.v.index(slot * FORM.PARTS + PART).permute((1, 0)).load(TOKENS)
        mbarrier.wait(barriers.copied.index(slot), phase)
        leave_scores(tiles, slot, i, scale, PART * ROWS, ROWS, FORM)
        fence_async_shared()
        mbarrier.arrive(barriers.paired.index(0))
        if FORM.SAVE:
            pairs, row = tiles.p.index(0).slice(PART * ROWS, ROWS), number * CHUNK + PART * ROWS
            tma.async_copy_shared_to_global(saved.scores, [row, 0], pairs)
            save_state(saved.states, number, left, PART, FORM)
        q, k = tiles.q.index(slot).permute((1, 0)), tiles.k.index(slot).permute((1, 0))
        o = warpgroup_mma(left, q, zero, use_acc=False, is_async=True)
        if FORM.TIED:
            erased = warpgroup_mma(left, k, zero, use_acc=False, is_async=True)
            o = warpgroup_mma_wait(1, deps=(o,))
            o = o * read
            erased = warpgroup_mma_wait(0, deps=(erased,))
            w, f = corrected(tiles, gate, v, erased, FORM)
            right = gl.convert_layout(w.to(dtype), OF_TOKENS)
            mbarrier.wait(barriers.scored.index(0), i & 1)
            u = tiles.u.index(slot).permute((1, 0))
            x = warpgroup_mma(right, u, f, is_async=True)
            s = s * tiles.ends.index(slot).load(gl.SliceLayout(0, STATE))[None, :]
            x = warpgroup_mma_wait(0, deps=(x,))
            if FORM.SAVE:
                errors = x.to(dtype)
                x *= tiles.gates.index(gate + GATE.BETA).load(TOKEN)[None, :]
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
        if FORM.SAVE and FORM.TIED:
            # In the place of v, which is in registers.
            e = tiles.v.index(slot * FORM.PARTS + PART)
            e.permute((1, 0)).store(errors)
            fence_async_shared()
            barrier()
            at = [number * CHUNK, PART * VALUES]
            tma.async_copy_shared_to_global(saved.errors, at, e)
        s, o = warpgroup_mma_wait(0, deps=(s, o))
        if FORM.SAVE:
            tma.store_wait(0)
        mbarrier.arrive(barriers.empty.index(slot))
        mbarrier.wait(barriers.stored.index(PART), (i & 1) ^ 1)
        tiles.o.index(PART).permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.written.index(PART))
    gl.store(final_state + o_s, s)


@gluon.jit
def corrected(tiles, gate, v, erased, FORM: gl.constexpr):
    """W; with SAVE also F, which E begins with."""
    TOKEN: gl.constexpr = gl.SliceLayout(0, product(CHUNK))
    beta = tiles.gates.index(gate + GATE.BETA).load(TOKEN)[None, :]
    if FORM.SAVE:
        f = v.to(gl.float32) - erased * UNSHIFT
        w = f * beta
    else:
        erase = tiles.gates.index(gate + GATE.ERASE).load(TOKEN)[None, :]
        w = v.to(gl.float32) * beta - erased * erase
        # As in state.py.
        f = widened(w.to(tiles.q.dtype))
    return w, f


@gluon.jit
def save_state(states, number, low, PART: gl.constexpr, FORM: gl.constexpr):
    """S of the chunk's start."""
    low = gl.convert_layout(low, ROWS_OF_STATE)
    o_v, o_k = grid(VALUES, FORM.K, ROWS_OF_STATE)
    states += (number.to(gl.int64) * FORM.PARTS + PART) * (VALUES * FORM.K)
    gl.store(states + (o_v * FORM.K + o_k), low)
