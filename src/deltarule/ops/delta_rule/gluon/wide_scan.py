"""Both scans through chunks for heads with 256 keys, for Hopper: decay none or per head.

A program has 128 rows of the state S [V, K] of a value head, backwards of its gradient D, and goes
through the chunks of a sequence. The equations are those of triton/scan.py; P, N and the scalings
of rows are from triton/scores.py.

    load --- k, scalings -> 2 slots --+                 +-- S   E or X ----+
             v N   q P  --> 1 place --+--> compute -----+                  +--> copy engine
             (backwards dO for v)          (8 warps)    +-- o or dv -------+

S fills half of the registers of 8 warps. So its rounded copy, a left operand, is in shared memory,
from where it is saved, too; and there is no room to have o in flight before X is there.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.delta_rule.gluon.backward import stretch_of
from deltarule.ops.delta_rule.gluon.inverse import PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import CHUNK, product, single_barriers, straight
from deltarule.ops.delta_rule.gluon.movers import load, load_rows, room, store
from deltarule.ops.delta_rule.triton.tiles import SCALING, SCALINGS
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, new_barrier, present, square

# Keys of a head, and rows of its state that a program has.
K, V = gl.constexpr(256), gl.constexpr(128)
# Of the scalings of rows, the first: those that scans need.
ROWS = gl.constexpr(4)

# [1, V, K]: S; [2 and 1, 64, K]: k, q; [1, 64, V]: v, E, o; P, N; and [2, ROWS, 64] float32.
Tiles = namedtuple("Tiles", "state k q v errors out p n rows")
# What is there and may be overwritten: k and the scalings of rows; v and N; q and P.
Barriers = namedtuple("Barriers", "full_k empty_k full_v empty_v full_q empty_q")
# Of a chunk: first token, tokens that are there, and its number, that of S too.
Chunk = namedtuple("Chunk", "token left number state")
# What leaves, as descriptors.
Out = namedtuple("Out", "states errors rows")
# What a call has. A head's values make PARTS programs, those of a key head GROUP. GIVEN: the first
# S, or the last D. What leaves of a chunk: S or D, E or X, o or dv. Sequences are not CUT.
Form = namedtuple("Form", "BACK TIED DECAY SCALED ENDS PARTS GROUP GIVEN STATES ERRORS OUT CUT")


@gluon.jit
def chunk_of(n, work, FORM: gl.constexpr):
    """The n-th; backwards from the last."""
    i, left = n, CHUNK
    if FORM.BACK:
        i = work.chunks - 1 - n
    if FORM.ENDS != "whole":
        left = gl.minimum(work.tokens - i * CHUNK, CHUNK)
    state = (work.number + i) * work.heads + work.head
    return Chunk(work.token + i * CHUNK, left, state // FORM.PARTS, state)


@gluon.jit
def load_role(shared, of, FORM: gl.constexpr):
    """One warp: every tile, in the order in which places become free."""
    tiles, barriers, work = shared
    q, k, v, scores, corrections, scalings = of
    HAS_ROWS: gl.constexpr = FORM.TIED or FORM.SCALED
    SIZE: gl.constexpr = CHUNK * V * 2 + (CHUNK * CHUNK * 2 if FORM.TIED else 0)
    key = work.head // FORM.GROUP * K
    for n in range(work.chunks):
        at, slot, once = chunk_of(n, work, FORM), n % 2, (n & 1) ^ 1
        full, row = barriers.full_k.index(slot), at.number * CHUNK
        mbarrier.wait(barriers.empty_k.index(slot), ((n // 2) & 1) ^ 1)
        mbarrier.expect(full, CHUNK * K * 2 + (ROWS * CHUNK * 4 if HAS_ROWS else 0))
        load(k, at.token, key, at.left, full, tiles.k.index(slot), FORM.ENDS)
        if HAS_ROWS:
            rows = tiles.rows.index(slot)
            load_rows(scalings, at.number * SCALINGS, full, rows)
        full = room(barriers.full_v, barriers.empty_v, once, SIZE)
        load(v, at.token, work.head * V, at.left, full, tiles.v.index(0), FORM.ENDS)
        if FORM.TIED:
            load_rows(corrections, row, full, tiles.n.index(0))
        full = room(barriers.full_q, barriers.empty_q, once, CHUNK * K * 2 + CHUNK * CHUNK * 2)
        load(q, at.token, key, at.left, full, tiles.q.index(0), FORM.ENDS)
        load_rows(scores, row, full, tiles.p.index(0))


@gluon.jit
def compute_role(shared, of, out, scale, FORM: gl.constexpr):
    """S or D through all chunks, and what leaves of each."""
    tiles, barriers, work = shared
    chunk_decay, first, last = of
    STATE: gl.constexpr = product(K, 8)
    o_v = gl.arange(0, V, gl.SliceLayout(1, STATE))[:, None]
    o_s = o_v * K + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    s = gl.zeros([V, K], gl.float32, STATE)
    if FORM.GIVEN:
        s = gl.load(first + o_s)
    for n in range(work.chunks):
        at, end = chunk_of(n, work, FORM), 1.0
        if FORM.DECAY:
            end = gl.load(chunk_decay + at.number)
        # Places without slots have an index that the compiler does not know, as in backward.py.
        only, place = n >> 30, (at.state * V, 0, V)
        state = tiles.state.index(only)
        leave(out.states, place, state, state, s, FORM.STATES, "whole", FORM)
        mbarrier.wait(barriers.full_k.index(n % 2), (n // 2) & 1)
        own = tiles, barriers, out, at, n, only, work.head, scale
        if FORM.BACK:
            s = scan_back(own, s, end, FORM)
        else:
            s = scan_through(own, s, end, FORM)
        mbarrier.arrive(barriers.empty_q.index(0))
        mbarrier.arrive(barriers.empty_k.index(n % 2))
    tma.store_wait(0)
    gl.store(last + o_s, s)


@gluon.jit
def leave(
    x, at, place, tile, numbers, LEAVES: gl.constexpr, ENDS: gl.constexpr, FORM: gl.constexpr
):
    """Numbers, rounded, to a place in shared memory that is free again, and if they LEAVE to x."""
    if LEAVES:
        tma.store_wait(FORM.STATES + FORM.ERRORS + FORM.OUT - 1)
        barrier()
    tile.store(numbers.to(tile.dtype))
    fence_async_shared()
    barrier()
    if LEAVES:
        store(x, at[0], at[1], at[2], place, ENDS)


@gluon.jit
def leave_errors(own, x, FORM: gl.constexpr):
    """E, or X backwards."""
    if FORM.ERRORS:
        tiles, _, out, at, _, only, head, _ = own
        tile = tiles.errors.index(only)
        place = at.number * CHUNK, head % FORM.PARTS * V, CHUNK
        leave(out.errors, place, tile, tile.permute((1, 0)), x, True, "whole", FORM)


@gluon.jit
def leave_values(own, x, FORM: gl.constexpr):
    """o, or dv: the rows that are there."""
    if FORM.OUT:
        tiles, _, out, at, _, only, head, _ = own
        tile, place = tiles.out.index(only), (at.token, head * V, at.left)
        leave(out.rows, place, tile, tile.permute((1, 0)), x, True, FORM.ENDS, FORM)


@gluon.jit
def scaled(x, tiles, slot, which: gl.constexpr, HAS: gl.constexpr):
    """x [values, tokens] by a scaling of rows, if the call has it."""
    if HAS:
        rows = tiles.rows.index(slot)._reinterpret(gl.float32, [ROWS, CHUNK], PLAIN_1D)
        x = x * rows.index(which).load(gl.SliceLayout(0, product(CHUNK, 8)))[None, :]
    return x


@gluon.jit
def scan_through(own, s, end, FORM: gl.constexpr):
    """S at the chunk's end; E and o leave."""
    tiles, barriers, _, _, n, only, _, scale = own
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, product(K, 8), 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, product(CHUNK, 8), 2)
    slot, phase, state = n % 2, n & 1, tiles.state.index(only)
    dtype: gl.constexpr = state.dtype
    zero = gl.zeros([V, CHUNK], gl.float32, product(CHUNK, 8))
    x = zero
    if FORM.TIED:
        keys = tiles.k.index(slot).permute((1, 0))
        x = warpgroup_mma(state, keys, x, use_acc=False, is_async=True)
    mbarrier.wait(barriers.full_v.index(0), phase)
    if FORM.TIED:
        x = scaled(warpgroup_mma_wait(0, deps=(x,)), tiles, slot, SCALING.ERASE, FORM.SCALED)
    x = tiles.v.index(only).permute((1, 0)).load(product(CHUNK, 8)).to(gl.float32) - x
    if FORM.TIED:
        left = gl.convert_layout(scaled(x, tiles, slot, SCALING.BETA, True).to(dtype), OF_TOKENS)
        x = warpgroup_mma(left, tiles.n.index(only).permute((1, 0)), x, is_async=True)
    s *= end
    if FORM.TIED:
        x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(barriers.empty_v.index(0))
    mbarrier.wait(barriers.full_q.index(0), phase)
    queries = tiles.q.index(only).permute((1, 0))
    o = warpgroup_mma(state, queries, zero, use_acc=False, is_async=True)
    leave_errors(own, x, FORM)
    x = scaled(x, tiles, slot, SCALING.BETA, FORM.TIED)
    left = gl.convert_layout(x.to(dtype), OF_TOKENS)
    written = scaled(x, tiles, slot, SCALING.WRITE, FORM.SCALED).to(dtype)
    written = gl.convert_layout(written, OF_STATE)
    s = warpgroup_mma(written, tiles.k.index(slot), s, is_async=True)
    o = warpgroup_mma_wait(1, deps=(o,))
    if not FORM.SCALED:
        o *= scale
    o = scaled(o, tiles, slot, SCALING.READ, FORM.SCALED)
    o = warpgroup_mma(left, tiles.p.index(only).permute((1, 0)), o, is_async=True)
    s, o = warpgroup_mma_wait(0, deps=(s, o))
    leave_values(own, o, FORM)
    return s


@gluon.jit
def scan_back(own, d, end, FORM: gl.constexpr):
    """D at the chunk's start; X and dv leave."""
    tiles, barriers, _, _, n, only, _, scale = own
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, product(K, 8), 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, product(CHUNK, 8), 2)
    slot, phase, state = n % 2, n & 1, tiles.state.index(only)
    dtype: gl.constexpr = state.dtype
    keys = tiles.k.index(slot)
    y = gl.zeros([V, CHUNK], gl.float32, product(CHUNK, 8))
    y = warpgroup_mma(state, keys.permute((1, 0)), y, use_acc=False, is_async=True)
    mbarrier.wait(barriers.full_v.index(0), phase)
    d_o = tiles.v.index(only).permute((1, 0)).load(product(CHUNK, 8))
    read = d_o.to(gl.float32)
    if not FORM.SCALED:
        read *= scale
    read = scaled(read, tiles, slot, SCALING.READ, FORM.SCALED)
    read = gl.convert_layout(read.to(dtype), OF_STATE)
    d *= end
    mbarrier.wait(barriers.full_q.index(0), phase)
    y = scaled(warpgroup_mma_wait(0, deps=(y,)), tiles, slot, SCALING.WRITE, FORM.SCALED)
    d_o = gl.convert_layout(d_o, OF_TOKENS)
    y = warpgroup_mma(d_o, tiles.p.index(only), y, is_async=True)
    if FORM.TIED:
        y = warpgroup_mma_wait(0, deps=(y,))
        left = gl.convert_layout(scaled(y, tiles, slot, SCALING.BETA, True).to(dtype), OF_TOKENS)
        y = warpgroup_mma(left, tiles.n.index(only), y, is_async=True)
    d = warpgroup_mma(read, tiles.q.index(only), d, is_async=True)
    y = warpgroup_mma_wait(1, deps=(y,))
    x = scaled(y, tiles, slot, SCALING.BETA, FORM.TIED)
    if FORM.TIED:
        erased = scaled(0.0 - x, tiles, slot, SCALING.ERASE, FORM.SCALED)
        d = warpgroup_mma(gl.convert_layout(erased.to(dtype), OF_STATE), keys, d, is_async=True)
    mbarrier.arrive(barriers.empty_v.index(0))
    leave_errors(own, y, FORM)
    leave_values(own, x, FORM)
    return warpgroup_mma_wait(0, deps=(d,))


@gluon.jit
def new_tiles(dtype: gl.constexpr):
    """227 KB, if a call has everything."""
    SQUARE: gl.constexpr = square()
    return Tiles(
        gl.allocate_shared_memory(dtype, [1, V, K], SQUARE),
        gl.allocate_shared_memory(dtype, [2, CHUNK, K], SQUARE),
        gl.allocate_shared_memory(dtype, [1, CHUNK, K], SQUARE),
        gl.allocate_shared_memory(dtype, [1, CHUNK, V], SQUARE),
        gl.allocate_shared_memory(dtype, [1, CHUNK, V], SQUARE),
        gl.allocate_shared_memory(dtype, [1, CHUNK, V], SQUARE),
        gl.allocate_shared_memory(dtype, [1, CHUNK, CHUNK], SQUARE),
        gl.allocate_shared_memory(dtype, [1, CHUNK, CHUNK], SQUARE),
        gl.allocate_shared_memory(gl.float32, [2, ROWS, CHUNK], straight()),
    )


@gluon.jit(do_not_specialize=["T", "programs"])
def wide_scan_kernel(
    q, k, v, values, states, errors, scores, corrections, scalings, chunk_decay, first, last,
    cu_seqlens, scale, T, programs, FORM: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors of tiles up to scalings; a sequence has so many programs.

    Forwards o is `values`, and S goes from `first` to `last`; backwards v is dO, `values` dv,
    `states` D, `errors` X. What is None is not there, or not asked for.
    """
    work, _ = stretch_of(present(cu_seqlens, T), T, programs, 0, FORM)
    state = gl.program_id(0).to(gl.int64) * (V * K)
    last += state
    if FORM.GIVEN:
        first += state
    first, chunk_decay = present(first, last), present(chunk_decay, last)
    corrections, scalings = present(corrections, scores), present(scalings, scores)
    tiles = new_tiles(k.dtype)
    barriers = Barriers(new_barrier(2, 1), new_barrier(2, 1), *single_barriers(4))
    barrier()
    shared = tiles, barriers, work
    out = Out(present(states, v), present(errors, v), present(values, v))
    gl.warp_specialize(
        [
            (compute_role, (shared, (chunk_decay, first, last), out, scale, FORM)),
            (load_role, (shared, (q, k, v, scores, corrections, scalings), FORM)),
        ],
        [1],
        [REGISTERS],
    )
    end_barriers(barriers)
