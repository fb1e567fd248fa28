"""What the roles of the backward in one kernel share: tiles in shared memory, barriers, chunks."""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.gradient_memory import FACTORS, Pair, Tiles
from deltarule.ops.delta_rule.gluon.inverse import PLAIN, PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import CHUNK, new_barrier, packed_bounds, square


class Barriers(NamedTuple):
    """What is there, and what may be overwritten."""

    # Of two slots: q, k, P, N and the factors of rows.
    full: Any
    empty: Any
    # dO, E and S have a place each.
    full_o: Any
    empty_o: Any
    full_e: Any
    empty_e: Any
    full_s: Any
    empty_s: Any
    # dv is in the place of X, and out of it; dq and dk are where q and k were.
    has_values: Any
    took_values: Any
    has_keys: Any
    has_sums: Any
    took_sums: Any


class Stretch(NamedTuple):
    """The chunks of a program: first token, tokens, how many chunks, number of the first; its head.

    `opens`: its sequence begins with it.
    """

    token: Any
    tokens: Any
    chunks: Any
    number: Any
    head: Any
    heads: Any
    opens: Any


@triton.constexpr_function
def all_rows(columns: int) -> Any:
    """The sums of a product of 128 rows by 8 warps."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.jit
def chunk_of(n, work, ENDS: gl.constexpr):
    """The n-th chunk from the last."""
    i = work.chunks - 1 - n
    left = CHUNK
    if ENDS != "whole":
        left = gl.minimum(work.tokens - i * CHUNK, CHUNK)
    slot = (work.number + i) * work.heads + work.head
    return Pair(work.token + i * CHUNK, work.head, work.head, slot, slot, left)


@gluon.jit
def of_chunk(tiles, n):
    """The tiles of the n-th chunk; of those without slots the only one, as in channel_memory.py."""
    slot, only = n % 2, n >> 30
    return Tiles(
        tiles.d_o.index(only), tiles.errors.index(only), tiles.d_errors.index(only), tiles.factors,
        tiles.states.index(only), tiles.d_states.index(only), tiles.q.index(slot),
        tiles.k.index(slot), tiles.read_pairs.index(slot), tiles.erase_pairs.index(slot),
        tiles.sums,
    )  # fmt: skip


@gluon.jit
def new_tiles(dtype: gl.constexpr, K: gl.constexpr, V: gl.constexpr, FORM: gl.constexpr):
    """Shared memory for all tiles: q, k, P with GP, N with GM and the factors have two slots."""
    SQUARE: gl.constexpr = square()
    d_o = gl.allocate_shared_memory(dtype, [1, CHUNK, V], SQUARE)
    errors = gl.allocate_shared_memory(dtype, [1, CHUNK, V], SQUARE)
    d_errors = gl.allocate_shared_memory(dtype, [1, CHUNK, V], SQUARE)
    factors = gl.allocate_shared_memory(gl.float32, [2 * FACTORS, CHUNK], PLAIN_1D)
    states = gl.allocate_shared_memory(dtype, [1, V, K], SQUARE)
    d_states = gl.allocate_shared_memory(dtype, [1, V, K], SQUARE)
    q = gl.allocate_shared_memory(dtype, [2, CHUNK, K], SQUARE)
    k = gl.allocate_shared_memory(dtype, [2, CHUNK, K], SQUARE)
    read_pairs = gl.allocate_shared_memory(dtype, [2, CHUNK, CHUNK], SQUARE)
    erase_pairs, sums = read_pairs, factors
    if FORM.TIED:
        erase_pairs = gl.allocate_shared_memory(dtype, [2, CHUNK, CHUNK], SQUARE)
    if FORM.DECAY:
        sums = gl.allocate_shared_memory(gl.float32, [4, CHUNK, 2], PLAIN)
    return Tiles(
        d_o, errors, d_errors, factors, states, d_states, q, k, read_pairs, erase_pairs, sums
    )  # fmt: skip


@gluon.jit
def new_barriers():
    """All barriers: of what has slots two, of all else one."""
    return Barriers(
        new_barrier(2, 2), new_barrier(2, 1), new_barrier(1, 1), new_barrier(1, 1),
        new_barrier(1, 1), new_barrier(1, 1), new_barrier(1, 1), new_barrier(1, 1),
        new_barrier(1, 1), new_barrier(1, 1), new_barrier(1, 1), new_barrier(1, 1),
        new_barrier(1, 1),
    )  # fmt: skip


@gluon.jit
def stretch_of(cu_seqlens, T, heads, per_segment, FORM: gl.constexpr):
    """Where this program is, and its sequence: heads follow each other."""
    program = gl.program_id(0)
    head, sequence = program % heads, program // heads
    token, tokens, opens = sequence * T, T, sequence >= 0
    number = sequence * ((T + CHUNK - 1) // CHUNK)
    if FORM.CUT:
        size = per_segment * CHUNK
        segments = (T + size - 1) // size
        place, sequence = sequence % segments, sequence // segments
        token, opens = sequence * T + place * size, place == 0
        number = sequence * ((T + CHUNK - 1) // CHUNK) + place * per_segment
        tokens = gl.minimum(T - place * size, size)
    elif FORM.ENDS == "packed":
        start, tokens = packed_bounds(cu_seqlens, sequence, T)
        token, number = start.to(gl.int32), (start // CHUNK).to(gl.int32) + sequence
    chunks = (tokens + CHUNK - 1) // CHUNK
    return Stretch(token, tokens, chunks, number, head, heads, opens), sequence
