"""The role that goes before the state: U or N (inverse.py), or P where nothing is erased.

    M_ij = decay(j, i] k_i . k_j / (|k_i| |k_j|)            for j < i, and 0 for the others
    P_ij = scale decay(j, i] q_i . k_j / (|q_i| |k_j|)      for j <= i, and 0 for the others

(j // n <= i of tokens i and rows j, with n writes a token; the norms with `normalize_qk` only).
Of P the scalings with decays are one power of two of the difference of two sums, which is 0 at
most: exact whatever the decays. Without decays they are factors of the row and of the column.

Of M in a block of 16 tokens the decay is a power of two of a difference of sums. Before it, it is
that up to the block's start times that from there on, 1 at most both: exact whatever the decays,
and two products in place of an exponential.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from deltarule.ops.delta_rule.gluon.inverse import (
    BATCH,
    four,
    invert,
    invert_blocks,
    joined,
    rows_and_columns,
)
from deltarule.ops.delta_rule.gluon.memory import BLOCK, BLOCKS, CHUNK, GATE, GATES, product
from deltarule.ops.delta_rule.gluon.products import finish, start, tell, value
from deltarule.ops.runtime.gluon_tiles import barrier

# Of this power of two nothing is left.
NOTHING = gl.constexpr(-1000.0)


@gluon.jit
def start_pairs(tiles, slot, places, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """k_j . q_i of all j and the rows i of a part, [64, ROWS], in flight."""
    zero = gl.zeros([CHUNK, ROWS], gl.float32, product(ROWS))
    q = tiles.q.index(slot)
    if q.shape[0] != ROWS:
        q = q.slice(FIRST, ROWS)
    kq = start(places.pairs, tiles.k.index(slot), q.permute((1, 0)), zero, False)
    tell(places.has_pairs)
    return kq


@gluon.jit
def later(ROWS: gl.constexpr, FIRST: gl.constexpr, STEPS: gl.constexpr):
    """Whether the tokens i of a part are not before rows j, [64, ROWS]."""
    LAYOUT: gl.constexpr = product(ROWS)
    o_i = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    # i >= j with what the compiler knows of i, its register, on one side alone: as one comparison
    # of unknowns it would be kept for all elements, in registers that there are not.
    return (o_i & 57) + FIRST >= o_j // STEPS - (o_i & 6)


@gluon.jit
def finish_pairs(
    tiles, slot, pair_slot, scale, kq, places, phase, FIRST: gl.constexpr,
    ROWS: gl.constexpr, FORM: gl.constexpr, LEFT: gl.constexpr = 0,
):  # fmt: skip
    """Wait for k_j . q_i, with LEFT products begun since, and leave P of the rows i of a part."""
    LAYOUT: gl.constexpr = product(ROWS)
    I: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    J: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    not_before = later(ROWS, FIRST, FORM.STEPS)
    gate = slot * GATES
    kq = value(finish((kq,), places.has_pairs, phase, LEFT), LAYOUT)
    if FORM.DECAY:
        sum_i = tiles.gates.index(gate + GATE.QUERY_SUM).slice(FIRST, ROWS).load(I)[None, :]
        sum_j = tiles.gates.index(gate + GATE.COLUMN_SUM).load(J)[:, None]
        p = kq * gl.exp2(gl.where(not_before, sum_i - sum_j, NOTHING))
    else:
        p = gl.where(not_before, kq, 0.0)
        if FORM.UNIT:
            p *= tiles.gates.index(gate + GATE.READ).slice(FIRST, ROWS).load(I)[None, :]
            p *= tiles.gates.index(gate + GATE.WRITE).load(J)[:, None]
        else:
            p *= scale
    out = tiles.p.index(pair_slot)
    if out.shape[0] != ROWS:
        out = out.slice(FIRST, ROWS)
    out.permute((1, 0)).store(p.to(out.dtype))


@gluon.jit
def following(slot, phase, SLOTS: gl.constexpr):
    """The next chunk's: carried along, because a division by three takes as long as a product."""
    return (slot + 1) % SLOTS, phase ^ ((slot + 1) // SLOTS)


@gluon.jit
def score_role(shared, scale, places, SLOTS: gl.constexpr, FORM: gl.constexpr):
    """What the state roles wait for, chunk by chunk; it is saved, too."""
    tiles, barriers, place, saved = shared
    TIED: gl.constexpr = FORM.TIED
    SAVE: gl.constexpr = FORM.SAVE and (TIED or FORM.SCORES)
    slot, phase = 0, 0
    for i in range(place.chunks):
        mbarrier.wait(barriers.full.index(slot), phase)
        if SAVE:
            # What was left here has gone.
            tma.store_wait(SLOTS - 1)
            barrier()
        if TIED:
            minus_l, minus_l_t, minus_m = leave_m(tiles, slot, slot, places, i & 1, FORM)
            barrier()
            u = invert(tiles, slot, slot, invert_blocks(minus_l, minus_l_t), minus_m, SAVE)
            tiles.u.index(slot).store(u.to(tiles.u.dtype))
        else:
            kq = start_pairs(tiles, slot, places, 0, CHUNK // FORM.STEPS)
            finish_pairs(tiles, slot, slot, scale, kq, places, i & 1, 0, CHUNK // FORM.STEPS, FORM)
        fence_async_shared()
        mbarrier.arrive(barriers.scored.index(slot))
        row = (place.slot + i * place.value_heads) // FORM.PER_GATE * CHUNK
        if SAVE and TIED:
            tma.async_copy_shared_to_global(saved.corrections, [row, 0], tiles.u.index(slot))
        elif SAVE:
            tma.async_copy_shared_to_global(saved.scores, [row, 0], tiles.p.index(slot))
        slot, phase = following(slot, phase, SLOTS)
    if SAVE:
        tma.store_wait(0)


@gluon.jit
def leave_m(tiles, slot, gate_slot, places, phase, FORM: gl.constexpr):
    """M but its blocks on the diagonal to `rows`, and - L and - M of those, as decayed_blocks.

    That in `rows` is in float16 and without the FACTOR of its rows (gates.py).
    """
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, product(CHUNK))
    k = tiles.k.index(slot)
    kk = start(places.pairs, k, k.permute((1, 0)), zero, False)
    tell(places.has_pairs)
    kk = value(finish((kk,), places.has_pairs, phase), product(CHUNK))
    columns = columns_of(kk)
    a, b, c, _ = columns
    own = blocks_of(columns)
    minus_l, minus_m = decayed_blocks(tiles, gate_slot, own, 2, FORM)
    minus_l_t, minus_m = decayed_blocks(tiles, gate_slot, own, 1, FORM)
    before = tiles.before.index(gate_slot).reshape([BLOCKS, CHUNK])
    a, b, c = decayed(a, before, 0), decayed(b, before, 1), decayed(c, before, 2)
    zero = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, BATCH)
    kk = gl.reshape(gl.permute(joined((a, b, c, zero)), (0, 1, 3, 4, 2)), [CHUNK, CHUNK])
    tiles.rows.store(gl.convert_layout(kk, product(CHUNK)).to(gl.float16))
    return minus_l, minus_l_t, minus_m


@gluon.jit
def decayed(kk, before, COLUMN: gl.constexpr):
    left = before.slice(COLUMN * BLOCK, BLOCK, dim=1).load(gl.SliceLayout(1, BATCH))
    return kk * gl.expand_dims(left, 1)


@gluon.jit
def columns_of(x):
    """x [64, 64] by its columns, 16 each [block, row, column]."""
    x = gl.permute(gl.reshape(x, [BLOCKS, BLOCK, 2, 2, BLOCK]), (0, 1, 4, 2, 3))
    a, b, c, d = four(x)
    a, b = gl.convert_layout(a, BATCH), gl.convert_layout(b, BATCH)
    return a, b, gl.convert_layout(c, BATCH), gl.convert_layout(d, BATCH)


@gluon.jit
def blocks_of(columns):
    """The blocks on the diagonal [block, row, column]: a choice for each warp."""
    a, b, c, d = columns
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, BATCH))
    block = gl.arange(0, BLOCKS, LAYOUT)[:, None, None]
    return gl.where(block < 2, gl.where(block == 0, a, b), gl.where(block == 2, c, d))


@gluon.jit
def decayed_blocks(tiles, gate_slot, kk, I: gl.constexpr, FORM: gl.constexpr):
    """- L of the blocks on the diagonal, of their k_i . k_j; with SAVE - M, too.

    [block, i, j] where I is 2, and transposed where it is 1. K K^T is symmetric.
    """
    J: gl.constexpr = 3 - I
    row, column = rows_and_columns(BLOCK)
    gate = gate_slot * GATES
    if FORM.DECAY:
        kk *= gl.exp2(
            of_blocks(tiles, gate + GATE.KEY_SUM, I) - of_blocks(tiles, gate + GATE.COLUMN_SUM, J)
        )
        kk *= -1.0 if FORM.SAVE else -1.0 * of_blocks(tiles, gate + GATE.BETA, I)
    else:
        kk *= of_blocks(tiles, gate + GATE.FACTOR, I)
        if FORM.UNIT:
            kk *= of_blocks(tiles, gate + GATE.WRITE, J)
    # A choice, because a power for i < j may be infinite.
    kk = gl.where((row > column) if I == 2 else (column > row), kk, 0.0)
    minus_l = kk
    if FORM.SAVE:
        minus_l *= of_blocks(tiles, gate + GATE.BETA, J)
    return minus_l, kk


@gluon.jit
def of_blocks(tiles, gate, AXIS: gl.constexpr):
    """Of each row of blocks [block, row, column], or where AXIS is 1 of each column."""
    x = tiles.gates.index(gate).reshape([BLOCKS, BLOCK]).load(gl.SliceLayout(AXIS, BATCH))
    return gl.expand_dims(x, AXIS)
