"""What the roles of a program share: tiles in shared memory, barriers, and the program's place."""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.runtime.gluon_tiles import new_barrier
from deltarule.ops.runtime.rows import row_names

# Rows of a chunk: those of one warpgroup's product. With n writes a token, a token has n rows.
CHUNK = gl.constexpr(64)
# Values of a state role: the rows of S that it keeps.
VALUES = gl.constexpr(64)

# Gates of a chunk, a number for each row, or of what is read for each token (gates.py).
GATE = row_names("READ ERASE BETA WRITE END QUERY_SUM KEY_SUM COLUMN_SUM FACTOR")
GATES = gl.constexpr(9)
# Blocks of 16 tokens on the diagonal of a chunk's square tiles, one a warp.
BLOCK, BLOCKS = gl.constexpr(16), gl.constexpr(4)
# Tiles of P that the state roles make: one is written while another is read.
PAIR_SLOTS = gl.constexpr(2)

# Tiles in shared memory; those of a chunk lie in its slot, chunk i in slot i % SLOTS.
Tiles = namedtuple(
    "Tiles",
    # [SLOTS, 64 / n, K], [SLOTS, 64, K] and [SLOTS * V / 64, 64, 64].
    "q k v "
    # [SLOTS, 64, 64]: U with an erase, or with SAVE N; [2 or SLOTS, 64 / n, 64]: P.
    "u p "
    # [V / 64, 64 / n, 64]: o, of the chunk before the one that is being worked out.
    "o "
    # With SAVE [V / 64, 64, K] and, with an erase, [V / 64, 64, 64]: S and E on their way out.
    "saved errors "
    # [SLOTS * GATES, 64] float32.
    "gates "
    # [64] float32: sums of log2 decay, of the gate role alone.
    "sums "
    # [SLOTS, 4 * 64] float32, with an erase: what is left of a token where a later block begins.
    "before "
    # For the inverse: [64, 64] in float16.
    "rows",
)

# Barriers of each slot (the first three), of each tile of P, and of each state role's o.
Barriers = namedtuple(
    "Barriers",
    # q, k, v and the gates are there; the state roles have done with all of it.
    "full empty "
    # U or N, or without an erase P, is there.
    "scored "
    # All state roles have left their rows of P.
    "paired "
    # o of a state role is there; it is in global memory.
    "written stored",
)


class Form(NamedTuple):
    """What a kernel is compiled for, in forwards and backwards: a tied erase, scalings of rows.

    Those are of decays and unit norm; with a decay per channel tiles are scaled before their
    products, and the norms with them (NORMS). ENDS: sequences have "whole" chunks, a last one may
    be "ragged", or they are "packed". STEPS is the number n of a token's writes, in the rows n t to
    n t + n - 1. PER_GATE heads share a gate, and what is saved but S and E: they leave the same
    bits there. Tiles have K keys and V values, a key KEYS channels and a value WIDTH. Products have
    TENSOR memory, or registers.

    Forwards have PARTS state roles, and SLOTS for chunks in shared memory; they may have an INITIAL
    state, and SAVE what backwards ask for, SCORES among it; S and E lie where gradients will
    (LENDS). Gradients are those of GROUP value heads of a key head.
    VALUES: dv is left. KEPT: S and E are those of all chunks. D and X may lie in the gradients. In
    one kernel with the scan back sequences may be CUT, and D given at their ends (FINAL). Where
    HALVES are 2, programs take the halves of a key head's channels in turn, as if they were heads.
    """

    TIED: bool
    DECAY: bool
    UNIT: bool
    ENDS: str
    K: int = 128
    V: int = 128
    TENSOR: bool = False
    NORMS: bool = False
    STEPS: int = 1
    PER_GATE: int = 1
    KEYS: int = 128
    WIDTH: int = 128
    PARTS: int = 2
    SLOTS: int = 1
    INITIAL: bool = False
    SAVE: bool = False
    SCORES: bool = False
    LENDS: bool = False
    GROUP: int = 1
    VALUES: bool = True
    KEPT: bool = True
    X_IS_LENT: bool = False
    D_IS_LENT: bool = False
    CUT: bool = False
    FINAL: bool = False
    HALVES: int = 1


# First token and number of tokens of the program's sequence, its chunks, and its heads.
#
# What is saved of its chunk i has the number `slot` + i `value_heads`.
Place = namedtuple("Place", "start tokens chunks value_head key_head value_heads slot")

# What a backward is saved from computing again, as triton/passes.py keeps it.
Saved = namedtuple(
    "Saved",
    # Descriptors of [slots * V, K] and of [slots * 64, V or 64]. Where gradients will be (LENDS),
    # the first 64 rows of S and the last lie as q and k do, and E as v.
    "states lower_states errors scores corrections "
    # Pointers to [slots, SCALINGS, 64] and to [slots].
    "scalings chunk_decay",
)


@triton.constexpr_function
def straight(rank: int = 2, bits: int = 32) -> Any:
    """Tiles as the copy engine takes them, rows one after the other."""
    return gl.NVMMASharedLayout(0, bits, rank=rank)


@triton.constexpr_function
def product(columns: int, warps: int = 4) -> Any:
    """The sums of a product of 64 rows by a warpgroup, or by 8 warps of 128."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def grid(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, FIRST: gl.constexpr = 0):
    """The numbers of rows from FIRST on, one below the other, and of columns, side by side."""
    o_r = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    return o_r, gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def single_barriers(number: gl.constexpr) -> Any:
    """So many, each of one place that one role tells of."""
    found = (new_barrier(1, 1),)
    for _ in gl.static_range(number - 1):
        found = found + (new_barrier(1, 1),)  # type: ignore[assignment] # noqa: RUF005
    return found


@gluon.jit
def rows_of_state(
    FIRST: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, FORM: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where rows of a tile [V, K] lie in a state [WIDTH, KEYS], and which of it is there."""
    o_v = (FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))[:, None]
    o_s, there = o_v * FORM.KEYS + gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :], True
    if FORM.KEYS < K or FORM.WIDTH < V:
        o_k = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
        there = (o_v < FORM.WIDTH) & (o_k < FORM.KEYS)
    return o_s, there


@gluon.jit
def packed_bounds(cu_seqlens, sequence, T):
    """First token and number of tokens of a packed sequence; offsets out of range are clamped."""
    start = gl.minimum(gl.maximum(gl.load(cu_seqlens + sequence).to(gl.int64), 0), T)
    end = gl.minimum(gl.load(cu_seqlens + sequence + 1).to(gl.int64), T)
    return start, gl.maximum(end - start, 0).to(gl.int32)
