"""The role that keeps 64 rows of a head's state S [V, K] in registers and goes through the chunks.

    W = beta V - erase (S K^T)^T      X = W + U W      O = read (S Q^T)^T + P X
    S <- end S + (write X)^T K

with U of the score role and the scalings of the gate role (gates.py); without an erase X = V. With
SAVE

    F = V - erase (S K^T)^T      E = F + N beta F      X = beta E

and S at the chunks' starts, E and P are left for a backward. S is a float32 sum of products, and
their left operand once it is rounded: so everything here is transposed, with values as rows and
tokens as columns. With an erase, when the score role has U to make, each of the V / 64 state roles
makes its share of the rows of P.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from deltarule.ops.delta_rule.gluon.memory import (
    CHUNK,
    GATE,
    GATES,
    PAIR_SLOTS,
    VALUES,
    Form,
    product,
    rows_of_state,
)
from deltarule.ops.delta_rule.gluon.movers import framed, place_of_rows
from deltarule.ops.delta_rule.gluon.products import finish, operand, put, start, tell, value
from deltarule.ops.delta_rule.gluon.score import finish_pairs, following, start_pairs
from deltarule.ops.runtime.gluon_tiles import barrier


@gluon.jit
def state_role(
    shared, states, places, PART: gl.constexpr, PARTS: gl.constexpr, K: gl.constexpr,
    SLOTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Rows 64 PART .. of the state; o of every chunk to shared memory; the final state."""
    tiles, barriers, place, saved = shared
    initial_state, final_state, scale = states
    STATE: gl.constexpr = product(K)
    TOKENS: gl.constexpr = product(CHUNK)
    QUERIES: gl.constexpr = CHUNK // FORM.STEPS
    ROWS: gl.constexpr = QUERIES // PARTS
    LATE: gl.constexpr = FORM.TIED or FORM.SAVE
    READS: gl.constexpr = product(QUERIES)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    dtype: gl.constexpr = tiles.q.dtype
    o_s, there = rows_of_state(PART * VALUES, VALUES, K, PARTS * VALUES, FORM, STATE)
    if FORM.INITIAL:
        s = gl.load(initial_state + o_s, mask=there, other=0.0)
    else:
        s = gl.zeros([VALUES, K], gl.float32, STATE)
    s = put(places.state, s)
    zero = gl.zeros([VALUES, CHUNK], gl.float32, TOKENS)
    nothing = gl.zeros([VALUES, QUERIES], gl.float32, READS)
    slot, phase = 0, 0
    for i in range(place.chunks):
        pair_slot = i % PAIR_SLOTS if FORM.TIED else slot
        gate = slot * GATES
        low = value(s, STATE)
        low = rounded(low) if FORM.TIED and dtype == gl.bfloat16 else low.to(dtype)
        left = operand(places.low_state, low, OF_TOKENS)
        mbarrier.wait(barriers.full.index(slot), phase)
        if FORM.TIED:
            # P wants nothing of S: made while S is read, it is waited for by nobody.
            kq = start_pairs(tiles, slot, places, PART * ROWS, ROWS)
        q, k = tiles.q.index(slot).permute((1, 0)), tiles.k.index(slot).permute((1, 0))
        o = start(places.out, left, q, nothing, False)
        tell(places.has_out)
        if FORM.TIED:
            finish_pairs(
                tiles, slot, pair_slot, scale, kq, places, i & 1, PART * ROWS, ROWS, FORM, 1
            )
            erased = start(places.erased, left, k, zero, False)
            tell(places.has_erased)
            # That P is there is told while S K^T is under way.
            fence_async_shared()
            mbarrier.arrive(barriers.paired.index(pair_slot))
            if not FORM.SAVE:
                # The fence was that of o of the chunk before, too; first of all, of nothing.
                mbarrier.arrive(barriers.written.index(PART))
        number = place.slot + i * place.value_heads
        at = i, phase, slot, pair_slot, number
        if FORM.SAVE:
            low = value(left, STATE)
            save_state(shared, i, number, low, PART, PARTS, K, FORM)
        v = tiles.v.index(slot * PARTS + PART).permute((1, 0)).load(TOKENS)
        if FORM.TIED:
            o = finish((o,), places.has_out, i & 1, 1)
        else:
            mbarrier.wait(barriers.scored.index(slot), phase)
            o = finish((o,), places.has_out, i & 1)
        o = value(o, READS)
        if not scales_late(FORM):
            o = outputs(tiles, slot, o, scale, FORM)
        if FORM.TIED:
            erased = value(finish((erased,), places.has_erased, i & 1), TOKENS)
            s, x, errors, o = written_values(
                shared, at, places, s, v, erased, o, scale, PART, PARTS, K, FORM
            )
        else:
            x, errors = v.to(gl.float32), zero
            s = decayed(tiles, gate, places, s, K, FORM.DECAY)
        s = updated(shared, at, places, s, o, x, errors, PART, K, FORM)
        if not LATE:
            fence_async_shared()
            mbarrier.arrive(barriers.written.index(PART))
        elif FORM.SAVE and FORM.TIED:
            errors = tiles.errors.index(PART)
            to = place_of_errors(place, i, number, PART, PARTS, FORM.LENDS)
            tma.async_copy_shared_to_global(saved.errors, to, errors)
        slot, phase = following(slot, phase, SLOTS)
    if LATE:
        fence_async_shared()
        mbarrier.arrive(barriers.written.index(PART))
        tma.store_wait(0)
    gl.store(final_state + o_s, value(s, STATE), mask=there)


@triton.constexpr_function
def copies_between(form: Form) -> int:
    """Copies on their way when the same of the next chunk is left: P and E, or S and P."""
    return (2 if form.SCORES else 1) if form.TIED else 0


@triton.constexpr_function
def scales_late(form: Form) -> bool:
    """Whether o is scaled while U W is under way, where registers are free for all its loads."""
    return form.TIED and not form.SAVE and form.PARTS == 2


@gluon.jit
def decayed(tiles, gate, places, s, K: gl.constexpr, DECAY: gl.constexpr):
    """S at the chunk's end, of what it was."""
    STATE: gl.constexpr = product(K)
    if DECAY:
        end = tiles.gates.index(gate + GATE.END).load(gl.SliceLayout(1, STATE))[:, None]
        s = put(places.state, value(s, STATE) * end)
    return s


@gluon.jit
def place_of_errors(place, i, number, PART: gl.constexpr, PARTS: gl.constexpr, LENDS: gl.constexpr):
    found = [number * CHUNK, PART * VALUES]
    if LENDS:
        column = (place.value_head * PARTS + PART) * VALUES
        found = [place.start.to(gl.int32) + i * CHUNK, column]
    return found


@gluon.jit
def save_state(
    shared, i, number, low, PART: gl.constexpr, PARTS: gl.constexpr, K: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """S of the chunk's start on its way out; o of the chunk before, too: first of all, nothing."""
    tiles, barriers, place, saved = shared
    tma.store_wait(copies_between(FORM))
    barrier()
    tiles.saved.index(PART).store(low)
    fence_async_shared()
    mbarrier.arrive(barriers.written.index(PART))
    if FORM.LENDS:
        at = [place.start.to(gl.int32) + i * CHUNK, place.key_head * K]
        states = saved.lower_states if PART == 1 else saved.states
        tma.async_copy_shared_to_global(states, at, tiles.saved.index(PART))
    else:
        at = place_of_rows(saved.states, (number * PARTS + PART) * VALUES, PARTS * VALUES)
        x = framed(tiles.saved.index(PART), saved.states)
        tma.async_copy_shared_to_global(saved.states, at, x)


@gluon.jit
def updated(
    shared, at, places, s, o, x, errors, PART: gl.constexpr, K: gl.constexpr, FORM: gl.constexpr
):
    """S of the chunk's end. P X is added to o, which is stored; with an erase while S goes on."""
    tiles, barriers, _, _ = shared
    i, _, slot, pair_slot, _ = at
    TOKENS: gl.constexpr = product(CHUNK)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, product(K), 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    O_FIRST: gl.constexpr = FORM.TIED and not FORM.SAVE
    dtype: gl.constexpr = tiles.q.dtype
    written, p = x, tiles.p.index(pair_slot).permute((1, 0))
    if FORM.DECAY or FORM.UNIT:
        write = tiles.gates.index(slot * GATES + GATE.WRITE)
        written = x * write.load(gl.SliceLayout(0, TOKENS))[None, :]
    if O_FIRST:
        o = start(places.out, operand(places.low_values, x.to(dtype), OF_TOKENS), p, o)
        tell(places.has_read)
    low = operand(places.written, written.to(dtype), OF_STATE)
    s = start(places.state, low, tiles.k.index(slot), s)
    if not O_FIRST:
        o = start(places.out, operand(places.low_values, x.to(dtype), OF_TOKENS), p, o)
    tell(places.has_state)
    if FORM.SAVE and FORM.TIED:
        tma.store_wait(copies_between(FORM))
        barrier()
        tiles.errors.index(PART).permute((1, 0)).store(errors)
        fence_async_shared()
    if O_FIRST:
        o = finish((o,), places.has_read, i & 1, 1)
    else:
        s, o = finish((s, o), places.has_state, i & 1)
        mbarrier.arrive(barriers.empty.index(slot))
    # With an erase or SAVE there has been an arrival for nothing before.
    LATE: gl.constexpr = 1 if FORM.TIED or FORM.SAVE else 0
    mbarrier.wait(barriers.stored.index(PART), (i & 1) ^ 1 ^ LATE)
    out = tiles.o.index(PART)
    out.permute((1, 0)).store(value(o, product(CHUNK // FORM.STEPS)).to(dtype))
    if O_FIRST:
        s = finish((s,), places.has_state, i & 1)
        mbarrier.arrive(barriers.empty.index(slot))
    return s


@gluon.jit
def rounded(x):
    """bfloat16, in instructions that stay here: the assembler moves others behind the start of
    K Q^T, and then has a role wait for that product before it reads S."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )


@gluon.jit
def outputs(tiles, slot, o, scale, FORM: gl.constexpr):
    """Of S: READ times S Q^T."""
    if FORM.DECAY or FORM.UNIT:
        read = tiles.gates.index(slot * GATES + GATE.READ).slice(0, CHUNK // FORM.STEPS)
        scale = read.load(gl.SliceLayout(0, product(CHUNK // FORM.STEPS)))[None, :]
    return o * scale


@gluon.jit
def widened(x):
    """bfloat16 in float32: of the two of a register, one takes a shift and one a mask."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32,
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def written_values(
    shared, at, places, s, v, erased, o, scale, PART: gl.constexpr, PARTS: gl.constexpr,
    K: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """S decayed, X, with SAVE E, and o of S, once this role's rows of P are there, too."""
    tiles, barriers, _, saved = shared
    i, phase, slot, pair_slot, number = at
    ROWS: gl.constexpr = CHUNK // FORM.STEPS // PARTS
    TOKENS: gl.constexpr = product(CHUNK)
    TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    dtype: gl.constexpr = tiles.q.dtype
    gate = slot * GATES
    erased *= tiles.gates.index(gate + GATE.ERASE).load(TOKEN)[None, :]
    beta = tiles.gates.index(gate + GATE.BETA).load(TOKEN)[None, :]
    if FORM.SAVE:
        f = v.to(gl.float32) - erased
        w = f * beta
    else:
        w = widened(v) * beta - erased
        # Rounded as U's operand: an error of W is then one of v, which an erase forgets.
        f = widened(w.to(dtype))
    right = operand(places.low_values, w.to(dtype), gl.DotOperandLayout(0, TOKENS, 2))
    if FORM.SCORES:
        pairs = tiles.p.index(pair_slot)
        if PARTS > 1:
            pairs = pairs.slice(PART * ROWS, ROWS)
        row = number // FORM.PER_GATE * CHUNK + PART * ROWS
        tma.async_copy_shared_to_global(saved.scores, [row, 0], pairs)
    mbarrier.wait(barriers.scored.index(slot), phase)
    u = tiles.u.index(slot).permute((1, 0))
    x = start(places.erased, right, u, f)
    tell(places.has_values)
    if scales_late(FORM):
        o = outputs(tiles, slot, o, scale, FORM)
    s = decayed(tiles, gate, places, s, K, FORM.DECAY)
    x = value(finish((x,), places.has_values, i & 1), TOKENS)
    errors = x
    if FORM.SAVE:
        errors = x.to(dtype)
        x *= tiles.gates.index(gate + GATE.BETA).load(TOKEN)[None, :]
    mbarrier.wait(barriers.paired.index(pair_slot), (i // PAIR_SLOTS) & 1)
    return s, x, errors, o
