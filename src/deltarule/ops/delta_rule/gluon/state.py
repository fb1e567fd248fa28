"""The role that keeps 64 rows of a head's state S [V, K] in registers and goes through the chunks.

    W = beta V - erase (S K^T)^T      X = T W      O = read (S Q^T)^T + P X
    S <- end S + (write X)^T K

with T of the score role and the scalings of the gate role (gates.py); without an erase X = V. With
SAVE

    F = V - erase (S K^T)^T      E = F + N beta F      X = beta E

and S at the chunks' starts, E and P are left for a backward.
 S is
a float32 sum of products, and their left operand once it is rounded: so everything here is
transposed, with values as rows and tokens as columns. With an erase, when the score role has T to
make, each of the V / 64 state roles makes its share of the rows of P.
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

from deltarule.ops.delta_rule.gluon.inverse import barrier
from deltarule.ops.delta_rule.gluon.memory import (
    BETA,
    CHUNK,
    END,
    ERASE,
    GATES,
    PAIR_SLOTS,
    READ,
    VALUES,
    WRITE,
    product,
)
from deltarule.ops.delta_rule.gluon.pairs import finish_pairs, start_pairs


@gluon.jit
def state_role(
    shared, states, PART: gl.constexpr, PARTS: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Rows 64 PART .. of the state; o of every chunk to shared memory; the final state."""
    tiles, barriers, place, saved = shared
    DECAY: gl.constexpr = FORM.DECAY
    TIED: gl.constexpr = FORM.TIED
    UNIT: gl.constexpr = FORM.UNIT
    SAVE: gl.constexpr = FORM.SAVE
    SCORES: gl.constexpr = FORM.SCORES and TIED
    # Copies on their way when the same of the next chunk is left: P and E, or S and P.
    OTHERS: gl.constexpr = (2 if SCORES else 1) if TIED else 0
    initial_state, final_state, scale = states
    STATE: gl.constexpr = product(K)
    TOKENS: gl.constexpr = product(CHUNK)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    ROWS: gl.constexpr = CHUNK // PARTS
    dtype: gl.constexpr = tiles.q.dtype
    o_v = PART * VALUES + gl.arange(0, VALUES, gl.SliceLayout(1, STATE))
    o_s = o_v[:, None] * K + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    if FORM.INITIAL:
        s = gl.load(initial_state + o_s)
    else:
        s = gl.zeros([VALUES, K], gl.float32, STATE)
    zero = gl.zeros([VALUES, CHUNK], gl.float32, TOKENS)
    for i in range(place.chunks):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        pair_slot = i % PAIR_SLOTS if TIED else slot
        gate = slot * GATES
        left = gl.convert_layout(s.to(dtype), OF_TOKENS)
        mbarrier.wait(barriers.full.index(slot), phase)
        o = warpgroup_mma(
            left, tiles.q.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if TIED:
            erased = warpgroup_mma(
                left, tiles.k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
        if SAVE:
            tma.store_wait(OTHERS)
            barrier()
            tiles.saved.index(PART).store(gl.convert_layout(left, STATE))
            # Under the first products o of the chunk before goes, too; first of all, nothing.
            fence_async_shared()
            mbarrier.arrive(barriers.written.index(PART))
            number = place.slot + i * place.value_heads
            tma.async_copy_shared_to_global(
                saved.states, [(number * PARTS + PART) * VALUES, 0], tiles.saved.index(PART)
            )
        v = tiles.v.index(slot * PARTS + PART).permute((1, 0)).load(TOKENS)
        if TIED:
            o = warpgroup_mma_wait(1, deps=(o,))
        else:
            mbarrier.wait(barriers.scored.index(slot), phase)
            o = warpgroup_mma_wait(0, deps=(o,))
        if DECAY or UNIT:
            o = o * tiles.gates.index(gate + READ).load(TOKEN)[None, :]
        else:
            o = o * scale
        if TIED:
            erased = warpgroup_mma_wait(0, deps=(erased,))
            kq = start_pairs(tiles, slot, PART * ROWS, ROWS)
            erased *= tiles.gates.index(gate + ERASE).load(TOKEN)[None, :]
            beta = tiles.gates.index(gate + BETA).load(TOKEN)[None, :]
            if SAVE:
                f = v.to(gl.float32) - erased
                w = f * beta
            else:
                w = v.to(gl.float32) * beta - erased
                f = zero
            right = gl.convert_layout(w.to(dtype), OF_TOKENS)
            finish_pairs(tiles, slot, pair_slot, scale, kq, PART * ROWS, ROWS, DECAY, UNIT)
            fence_async_shared()
            mbarrier.arrive(barriers.paired.index(pair_slot))
            if SCORES:
                pairs = tiles.p.index(pair_slot)
                if PARTS > 1:
                    pairs = pairs.slice(PART * ROWS, ROWS)
                tma.async_copy_shared_to_global(
                    saved.scores, [number * CHUNK + PART * ROWS, 0], pairs
                )
            mbarrier.wait(barriers.scored.index(slot), phase)
            x = warpgroup_mma(
                right, tiles.t.index(slot).permute((1, 0)), f, use_acc=SAVE, is_async=True
            )
            if DECAY:
                s = s * tiles.gates.index(gate + END).load(gl.SliceLayout(1, STATE))[:, None]
            x = warpgroup_mma_wait(0, deps=(x,))
            if SAVE:
                e = x.to(dtype)
                x *= tiles.gates.index(gate + BETA).load(TOKEN)[None, :]
            mbarrier.wait(barriers.paired.index(pair_slot), (i // PAIR_SLOTS) & 1)
        else:
            x = v.to(gl.float32)
            if DECAY:
                s = s * tiles.gates.index(gate + END).load(gl.SliceLayout(1, STATE))[:, None]
        written = x
        if DECAY or UNIT:
            written = x * tiles.gates.index(gate + WRITE).load(TOKEN)[None, :]
        s = warpgroup_mma(
            gl.convert_layout(written.to(dtype), OF_STATE), tiles.k.index(slot), s, is_async=True
        )
        o = warpgroup_mma(
            gl.convert_layout(x.to(dtype), OF_TOKENS), tiles.p.index(pair_slot).permute((1, 0)), o,
            is_async=True,
        )  # fmt: skip
        if SAVE and TIED:
            tma.store_wait(OTHERS)
            barrier()
            tiles.errors.index(PART).permute((1, 0)).store(e)
            fence_async_shared()
        s, o = warpgroup_mma_wait(0, deps=(s, o))
        mbarrier.arrive(barriers.empty.index(slot))
        # With SAVE there has been an arrival for nothing before.
        mbarrier.wait(barriers.stored.index(PART), (i & 1) if SAVE else (i & 1) ^ 1)
        tiles.o.index(PART).permute((1, 0)).store(o.to(dtype))
        if not SAVE:
            fence_async_shared()
            mbarrier.arrive(barriers.written.index(PART))
        elif TIED:
            tma.async_copy_shared_to_global(
                saved.errors, [number * CHUNK, PART * VALUES], tiles.errors.index(PART)
            )
    if SAVE:
        fence_async_shared()
        mbarrier.arrive(barriers.written.index(PART))
        tma.store_wait(0)
    gl.store(final_state + o_s, s)
