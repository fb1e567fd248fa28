"""P of some rows of a chunk: what its tokens read of what those up to them write.

    P_ij = scale decay(j, i] q_i . k_j / (|q_i| |k_j|)      for j <= i, and 0 for the others

(j // n <= i of tokens i and rows j, with n writes a token)

(the norms with `normalize_qk` only). With decays the scalings are one power of two of the
difference of two sums, which is 0 at most: exact whatever the decays. Without decays they are
factors of the row and of the column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.memory import (
    CHUNK,
    COLUMN_SUM,
    GATES,
    QUERY_SUM,
    READ,
    WRITE,
    product,
)
from deltarule.ops.delta_rule.gluon.products import finish, start, tell, value

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
def finish_pairs(
    tiles, slot, pair_slot, scale, kq, places, phase, FIRST: gl.constexpr,
    ROWS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Wait for k_j . q_i and leave P of the rows i of a part."""
    LAYOUT: gl.constexpr = product(ROWS)
    I: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    J: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    o_i, o_j = gl.arange(0, ROWS, I)[None, :], gl.arange(0, CHUNK, J)[:, None]
    # i >= j with what the compiler knows of i, its register, on one side alone: as one comparison
    # of unknowns it would be kept for all elements, in registers that there are not.
    known, lane = (o_i & 57) + FIRST, o_j // FORM.STEPS - (o_i & 6)
    gate = slot * GATES
    kq = value(finish((kq,), places.has_pairs, phase), LAYOUT)
    if FORM.DECAY:
        sum_i = tiles.gates.index(gate + QUERY_SUM).slice(FIRST, ROWS).load(I)[None, :]
        sum_j = tiles.gates.index(gate + COLUMN_SUM).load(J)[:, None]
        p = kq * gl.exp2(gl.where(known >= lane, sum_i - sum_j, NOTHING))
    else:
        p = gl.where(known >= lane, kq, 0.0)
        if FORM.UNIT:
            p *= tiles.gates.index(gate + READ).slice(FIRST, ROWS).load(I)[None, :]
            p *= tiles.gates.index(gate + WRITE).load(J)[:, None]
        else:
            p *= scale
    out = tiles.p.index(pair_slot)
    if out.shape[0] != ROWS:
        out = out.slice(FIRST, ROWS)
    out.permute((1, 0)).store(p.to(out.dtype))
