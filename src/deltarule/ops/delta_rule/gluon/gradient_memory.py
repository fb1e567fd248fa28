"""What the roles of the gradients share: tiles in shared memory, barriers and their work."""

from collections import namedtuple
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from deltarule.ops.delta_rule.gluon.inverse import PLAIN, PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import CHUNK, packed_bounds
from deltarule.ops.delta_rule.gluon.movers import load, load_rows, store
from deltarule.ops.runtime.gluon_tiles import square
from deltarule.ops.runtime.rows import row_names

# Rows of what roles leave each other in shared memory.
#
# Factors: of what is read, erased and written; of q and of k in pairs; beta; the sums of decays;
# 1 / |q|^2 and 1 / |k|^2; of packed sequences, as int32, where their dbeta lies, -1 after the end:
# looking it up takes as many loads as the search has steps; and what is written, without beta.
FACTOR = row_names(
    "READS ERASES WRITES QUERY KEY BETAS WHOLES RESTS QUERY_NORM KEY_NORM PLACES BARE_WRITES"
)
FACTORS = gl.constexpr(12)
# Tiles in shared memory; dO, E, X and the factors of value head n lie in slot n % 2.
Tiles = namedtuple(
    "Tiles",
    "d_o errors d_errors "
    # [2 * FACTORS, 64] float32.
    "factors "
    # [V, K].
    "states d_states "
    # [64, K].
    "q k "
    # [64, 64]: GP and GM.
    "read_pairs erase_pairs "
    # [4, 64, 2] float32, with decays: of each half of the channels.
    "sums",
)

# What is there, and what may be overwritten: of the slots, of S, D, and of q and k.
Barriers = namedtuple(
    "Barriers",
    "full empty full_s empty_s full_d empty_d full_k empty_k "
    # dv is in the slot of X; dq and dk are where q and k were; sums of rows are there, and taken.
    "has_values has_keys has_sums took_sums",
)

# Pairs of a chunk and a key head: this program's first, the step, how many; heads.
#
# Of every sequence's `all_chunks` these are `chunks` from number `before` on, and what the scan
# back left has room for `own_chunks` of each. Packed sequences share one row, and its numbers.
Work = namedtuple(
    "Work",
    "first step count heads chunks before own_chunks all_chunks "
    # Tokens of a row of the batch; with packed sequences their offsets, and how many there are.
    "T cu_seqlens sequences",
)


@triton.constexpr_function
def halves(columns: int) -> Any:
    """The sums of a product of 64 rows by 8 warps, half of the columns each four."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


# First token, key head and value head; the number of it among D and X, and among all.
#
# `left` tokens of it are there from the first on; none where no chunk has the number: every role
# passes over it.
Pair = namedtuple("Pair", "token head value_head own slot left")


@gluon.jit
def packed_place(number, work):
    """First token of a chunk of packed sequences, and how many follow (runtime/places.py)."""
    sequence, last = number * 0, work.sequences - 1
    # The last sequence whose first chunk is not after this one.
    while sequence < last:
        middle = (sequence + last + 1) // 2
        first = (gl.load(work.cu_seqlens + middle) // CHUNK).to(gl.int32) + middle
        sequence = gl.where(first <= number, middle, sequence)
        last = gl.where(first <= number, last, middle - 1)
    start, tokens = packed_bounds(work.cu_seqlens, sequence, work.T)
    before = (number - (start // CHUNK).to(gl.int32) - sequence) * CHUNK
    return start.to(gl.int32) + before, tokens - before


@gluon.jit
def pair_number(i, work, HALVES: gl.constexpr):
    """Of a program's i-th pair: the halves of a head follow each other."""
    return (work.first + i // HALVES * work.step) * HALVES + i % HALVES


@gluon.jit
def pairs_there(work, HALVES: gl.constexpr = 1):
    """How many of this program's pairs have tokens, of packed sequences; by 8 warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    o_p = gl.arange(0, 128, LAYOUT)
    found = 0
    for base in range(0, work.count, 128):
        pair = pair_number(base + o_p, work, HALVES)
        number = pair // work.heads + work.before
        sequence = number * 0
        last = sequence + (work.sequences - 1)
        # As packed_place searches, of all at once.
        length = work.sequences - 1
        while length > 0:
            middle = (sequence + last + 1) // 2
            first = (gl.load(work.cu_seqlens + middle) // CHUNK).to(gl.int32) + middle
            sequence = gl.where(first <= number, middle, sequence)
            last = gl.where(first <= number, last, middle - 1)
            length = length // 2
        start, tokens = packed_bounds(work.cu_seqlens, sequence, work.T)
        before = (number - (start // CHUNK).to(gl.int32) - sequence) * CHUNK
        there = (base + o_p < work.count) & (before < tokens)
        found += gl.sum(there.to(gl.int32), 0)
    return found


@gluon.jit
def pair_of(n, work, FORM: gl.constexpr):
    """The n-th value head of a program; ENDS are "whole", "ragged" or "packed"."""
    pair = pair_number(n // FORM.GROUP, work, FORM.HALVES)
    number, head = pair // work.heads, pair % work.heads
    sequence, chunk = number // work.chunks, number % work.chunks
    own, left = sequence * work.own_chunks + chunk, CHUNK
    if FORM.ENDS == "packed":
        chunk += work.before
        token, left = packed_place(chunk, work)
    elif FORM.ENDS == "ragged":
        before = (chunk + work.before) * CHUNK
        token, left = sequence * work.T + before, work.T - before
        chunk += sequence * work.all_chunks + work.before
    else:
        chunk += sequence * work.all_chunks + work.before
    value_heads = work.heads // FORM.HALVES * FORM.GROUP
    value_head = head // FORM.HALVES * FORM.GROUP + n % FORM.GROUP
    if FORM.ENDS == "whole":
        token = chunk * CHUNK
    else:
        left = gl.minimum(gl.maximum(left, 0), CHUNK)
    return Pair(
        token, head, value_head, own * value_heads + value_head, chunk * value_heads + value_head,
        left,
    )  # fmt: skip


@gluon.jit
def place_of_gates(at, work, o_t, FORM: gl.constexpr):
    """Where the gates of a value head's tokens lie in [B T, gates of all heads]."""
    gates = work.heads * FORM.GROUP // (FORM.PER_GATE * FORM.HALVES)
    return (at.token + o_t) * gates + at.value_head // FORM.PER_GATE


@gluon.jit
def places_of_rows(tiles, row, at, work, there, LAYOUT: gl.constexpr, FORM: gl.constexpr):
    """Where the gates of 64 tokens lie, as a column; and `there`, of those that are there."""
    o_r = gl.arange(0, CHUNK, LAYOUT)[:, None]
    if FORM.ENDS == "packed":
        place = (
            tiles.factors.index(row + FACTOR.PLACES)
            .load(LAYOUT)
            .to(gl.int32, bitcast=True)[:, None]
        )
        there = there & (place >= 0)
    else:
        place = place_of_gates(at, work, o_r, FORM)
        if FORM.ENDS == "ragged":
            there = there & (o_r < at.left)
    return place, there


@gluon.jit
def new_tiles(dtype: gl.constexpr, FORM: gl.constexpr):
    SQUARE: gl.constexpr = square()
    d_o = gl.allocate_shared_memory(dtype, [2, CHUNK, FORM.V], SQUARE)
    errors = gl.allocate_shared_memory(dtype, [2, CHUNK, FORM.V], SQUARE)
    factors = gl.allocate_shared_memory(gl.float32, [2 * FACTORS, CHUNK], PLAIN_1D)
    states = gl.allocate_shared_memory(dtype, [FORM.V, FORM.K], SQUARE)
    d_states = gl.allocate_shared_memory(dtype, [FORM.V, FORM.K], SQUARE)
    q = gl.allocate_shared_memory(dtype, [CHUNK, FORM.K], SQUARE)
    k = gl.allocate_shared_memory(dtype, [CHUNK, FORM.K], SQUARE)
    read_pairs = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SQUARE)
    d_errors, erase_pairs, sums = errors, read_pairs, factors
    if FORM.DECAY:
        sums = gl.allocate_shared_memory(gl.float32, [4, CHUNK, 2], PLAIN)
    if FORM.TIED:
        d_errors = gl.allocate_shared_memory(dtype, [2, CHUNK, FORM.V], SQUARE)
        erase_pairs = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], SQUARE)
    return Tiles(
        d_o, errors, d_errors, factors, states, d_states, q, k, read_pairs, erase_pairs, sums
    )  # fmt: skip


@gluon.jit
def load_role(shared, of, FORM: gl.constexpr):
    """One warp: every tile to where it is used, in the order in which places become free."""
    tiles, barriers, work = shared
    q, k, d_o, errors, d_errors, states, upper, lower = of
    done = 0
    for number in range(work.count * FORM.GROUP):
        at = pair_of(number, work, FORM)
        if at.left > 0:
            slot, phase = done % 2, (done // 2) & 1
            kept, half = at.slot if FORM.KEPT else at.own, at.head % FORM.HALVES
            mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
            full, row, column = barriers.full.index(slot), at.token, at.value_head * FORM.V
            mbarrier.expect(full, CHUNK * FORM.V * (6 if FORM.TIED else 4))
            load(d_o, row, column, at.left, full, tiles.d_o.index(slot), FORM.ENDS)
            if FORM.TIED:
                x = tiles.d_errors.index(slot)
                if not FORM.X_IS_LENT:
                    row, column = place_of_errors(at.own, FORM)
                load(d_errors, row, column, at.left, full, x, FORM.ENDS)
                row, column = place_of_errors(kept, FORM)
            load(errors, row, column, at.left, full, tiles.errors.index(slot), FORM.ENDS)
            full_d, full_s = barriers.full_d.index(0), barriers.full_s.index(0)
            mbarrier.wait(barriers.empty_d.index(0), (done & 1) ^ 1)
            mbarrier.expect(full_d, FORM.V * FORM.K * 2)
            if FORM.D_IS_LENT:
                load_lent_state(upper, lower, at, full_d, tiles.d_states)
            else:
                load_rows(upper, at.own * FORM.V, full_d, tiles.d_states, half * FORM.K)
            mbarrier.wait(barriers.empty_s.index(0), (done & 1) ^ 1)
            mbarrier.expect(full_s, FORM.V * FORM.K * 2)
            load_rows(states, kept * FORM.V, full_s, tiles.states, half * FORM.K)
            if done % FORM.GROUP == 0:
                full_k = barriers.full_k.index(0)
                mbarrier.wait(barriers.empty_k.index(0), ((done // FORM.GROUP) & 1) ^ 1)
                mbarrier.expect(full_k, CHUNK * FORM.K * 4)
                load(k, at.token, at.head * FORM.K, at.left, full_k, tiles.k, FORM.ENDS)
                load(q, at.token, at.head * FORM.K, at.left, full_k, tiles.q, FORM.ENDS)
            done += 1


@gluon.jit
def store_role(shared, of, FORM: gl.constexpr):
    """One warp: dv (VALUES) of every value head, dq and dk of every pair; their places are free."""
    tiles, barriers, work = shared
    d_q, d_k, d_v = of
    done = 0
    for number in range(work.count * FORM.GROUP):
        at = pair_of(number, work, FORM)
        if at.left > 0:
            slot = done % 2
            if FORM.VALUES:
                mbarrier.wait(barriers.has_values.index(slot), (done // 2) & 1)
                x = tiles.d_errors.index(slot)
                if at.head % FORM.HALVES == 0:
                    store(d_v, at.token, at.value_head * FORM.V, at.left, x, FORM.ENDS)
                tma.store_wait(0)
                mbarrier.arrive(barriers.empty.index(slot))
            if done % FORM.GROUP == FORM.GROUP - 1:
                mbarrier.wait(barriers.has_keys.index(0), (done // FORM.GROUP) & 1)
                store(d_q, at.token, at.head * FORM.K, at.left, tiles.q, FORM.ENDS)
                store(d_k, at.token, at.head * FORM.K, at.left, tiles.k, FORM.ENDS)
                tma.store_wait(0)
                mbarrier.arrive(barriers.empty_k.index(0))
            done += 1


@gluon.jit
def place_of_errors(number, FORM: gl.constexpr):
    """Where E or X of a chunk are, by parts or, of wide heads, with all values in a row."""
    found = [number * CHUNK, 0]
    if FORM.HALVES > 1:
        found = [number // FORM.PER_GATE * CHUNK, number % FORM.PER_GATE * FORM.V]
    return found


@gluon.jit
def load_lent_state(upper, lower, at, full, tile):
    """[V, K] of a chunk, of which the first 64 rows lie in one tensor of tokens, the others in one.

    Tiles of 64 columns: of a tile with more rows those lie apart from the others.
    """
    V: gl.constexpr = tile.shape[0]
    K: gl.constexpr = tile.shape[1]
    for top in gl.static_range(0, V, CHUNK):
        for left in gl.static_range(0, K, CHUNK):
            part = tile.slice(top, CHUNK).slice(left, CHUNK, 1)
            place = [at.token, at.head * K + left]
            tma.async_copy_global_to_shared(lower if top else upper, place, full, part)
