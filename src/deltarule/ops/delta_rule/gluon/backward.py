"""The scan back and the gradients of chunks as one kernel of several roles, for Hopper.

A program has one head of one sequence, or of a segment of one, and goes through its chunks from the
last to the first. D, the gradient by the state at a chunk's end, stays in registers, and neither D
nor X meets global memory. The equations are those of triton/scan.py and triton/gradients.py.

    load ----- q k P N --> 2 slots ---+                        +-- dv (over X) ----> store
               dO E S  --> 1 place ---+--> compute             +-- dq, dk (over q, k)
    factors --------------------------+    Y = P^T dO + D y'   +-- sums of rows ---> decays
                                           X = Y + N^T beta Y
                                           D <- ..             GP, GM (over P, N), dq dk dv dbeta

The compute role has 8 warps. For D they share its V rows, everything transposed and left operands
in registers, as in state.py; for the gradients they share columns, as in gradients.py.
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

from deltarule.ops.delta_rule.gluon.gradient_memory import (
    FACTOR,
    FACTORS,
    Pair,
    Tiles,
    halves,
    load_lent_state,
)
from deltarule.ops.delta_rule.gluon.gradients import (
    diagonal_halves,
    leave_decay_gradients,
    leave_factors,
    leave_keys,
    leave_pairs,
    leave_values,
    row_factor,
    store_beta_gradient,
    sums_of_halves,
)
from deltarule.ops.delta_rule.gluon.inverse import PLAIN, PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import (
    CHUNK,
    grid,
    packed_bounds,
    product,
    rows_of_state,
    single_barriers,
)
from deltarule.ops.delta_rule.gluon.movers import load, load_rows, room, store
from deltarule.ops.delta_rule.triton.tiles import SUM
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, new_barrier, present, square

# What is there, and what may be overwritten.
Barriers = namedtuple(
    "Barriers",
    # Of two slots: q, k, P, N and the factors of rows.
    "full empty "
    # dO, E and S have a place each.
    "full_o empty_o full_e empty_e full_s empty_s "
    # dv is in the place of X, and out of it; dq and dk are where q and k were.
    "has_values took_values has_keys has_sums took_sums",
)

# The chunks of a program: first token, tokens, how many chunks, number of the first; its head.
#
# `opens`: its sequence begins with it.
Stretch = namedtuple("Stretch", "token tokens chunks number head heads opens")


@gluon.jit
def chunk_of(n, work, ENDS: gl.constexpr):
    # From the last.
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
def new_tiles(dtype: gl.constexpr, FORM: gl.constexpr):
    """Shared memory for all tiles: q, k, P with GP, N with GM and the factors have two slots."""
    SQUARE: gl.constexpr = square()
    d_o = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.V], SQUARE)
    errors = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.V], SQUARE)
    d_errors = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.V], SQUARE)
    factors = gl.allocate_shared_memory(gl.float32, [2 * FACTORS, CHUNK], PLAIN_1D)
    states = gl.allocate_shared_memory(dtype, [1, FORM.V, FORM.K], SQUARE)
    d_states = gl.allocate_shared_memory(dtype, [1, FORM.V, FORM.K], SQUARE)
    q = gl.allocate_shared_memory(dtype, [2, CHUNK, FORM.K], SQUARE)
    k = gl.allocate_shared_memory(dtype, [2, CHUNK, FORM.K], SQUARE)
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


@gluon.jit
def factor_role(shared, scalings, norms, scale, FORM: gl.constexpr):
    _, _, work = shared
    for n in range(work.chunks):
        at = chunk_of(n, work, FORM.ENDS)
        leave_factors(shared, scalings, norms, scale, at, n, FORM)


@gluon.jit
def decay_role(shared, of, FORM: gl.constexpr):
    _, _, work = shared
    if FORM.DECAY:
        for n in range(work.chunks):
            leave_decay_gradients(shared, of, chunk_of(n, work, FORM.ENDS), n, FORM)


@gluon.jit
def load_role(shared, of, FORM: gl.constexpr):
    """One warp: every tile to where it is used, in the order in which places become free."""
    tiles, barriers, work = shared
    q, k, d_o, errors, states, lower_states, scores, corrections = of
    PAIRS: gl.constexpr = (1 if FORM.SCORES else 0) + (1 if FORM.TIED else 0)
    for n in range(work.chunks):
        at, slot = chunk_of(n, work, FORM.ENDS), n % 2
        full, once = barriers.full.index(slot), (n & 1) ^ 1
        mbarrier.wait(barriers.empty.index(slot), ((n // 2) & 1) ^ 1)
        mbarrier.expect(full, CHUNK * FORM.K * 4 + PAIRS * CHUNK * CHUNK * 2)
        load(k, at.token, at.head * FORM.K, at.left, full, tiles.k.index(slot), FORM.ENDS)
        load(q, at.token, at.head * FORM.K, at.left, full, tiles.q.index(slot), FORM.ENDS)
        if FORM.SCORES:
            load_rows(scores, at.slot * CHUNK, full, tiles.read_pairs.index(slot))
        if FORM.TIED:
            load_rows(corrections, at.slot * CHUNK, full, tiles.erase_pairs.index(slot))
        full = room(barriers.full_o, barriers.empty_o, once, CHUNK * FORM.V * 2)
        load(d_o, at.token, at.head * FORM.V, at.left, full, tiles.d_o.index(0), FORM.ENDS)
        row, column = at.token, at.head * FORM.V
        if FORM.TIED and not FORM.LENDS:
            row, column = at.slot * CHUNK, 0
        full = room(barriers.full_e, barriers.empty_e, once, CHUNK * FORM.V * 2)
        load(errors, row, column, at.left, full, tiles.errors.index(0), FORM.ENDS)
        full = room(barriers.full_s, barriers.empty_s, once, FORM.V * FORM.K * 2)
        if FORM.LENDS:
            load_lent_state(states, lower_states, at, full, tiles.states.index(0))
        else:
            load_rows(states, at.slot * FORM.V, full, tiles.states.index(0))


@gluon.jit
def store_role(shared, of, FORM: gl.constexpr):
    tiles, barriers, work = shared
    d_q, d_k, d_v = of
    for n in range(work.chunks):
        at, slot = chunk_of(n, work, FORM.ENDS), n % 2
        mbarrier.wait(barriers.has_values.index(0), n & 1)
        store(d_v, at.token, at.head * FORM.V, at.left, tiles.d_errors.index(0), FORM.ENDS)
        tma.store_wait(0)
        mbarrier.wait(barriers.has_keys.index(0), n & 1)
        # Only now: dk of the next chunk would otherwise come before dk of this is waited for.
        mbarrier.arrive(barriers.took_values.index(0))
        store(d_q, at.token, at.head * FORM.K, at.left, tiles.q.index(slot), FORM.ENDS)
        store(d_k, at.token, at.head * FORM.K, at.left, tiles.k.index(slot), FORM.ENDS)
        tma.store_wait(0)
        mbarrier.arrive(barriers.empty.index(slot))


@gluon.jit
def compute_role(shared, of, FORM: gl.constexpr):
    tiles, barriers, work = shared
    d_final, d_initial, chunk_decay, d_beta = of
    STATE: gl.constexpr = product(FORM.K, 8)
    o_s, there = rows_of_state(0, FORM.V, FORM.K, FORM.V, FORM, STATE)
    d = gl.zeros([FORM.V, FORM.K], gl.float32, STATE)
    if FORM.FINAL:
        d = gl.load(d_final + o_s, mask=there, other=0.0)
    for n in range(work.chunks):
        at, own = chunk_of(n, work, FORM.ENDS), (of_chunk(tiles, n), barriers, work)
        d = scan_back(own, chunk_decay, at, n, d, FORM)
        d = gradients(own, d_beta, at, n, d, FORM)
    rows = FORM.WIDTH
    if FORM.CUT:
        rows = gl.where(work.opens, FORM.WIDTH, 0)
    inside = o_s < rows * FORM.KEYS
    if FORM.KEYS < FORM.K:
        # Columns after a row's last are the next row's.
        inside = inside & there
    gl.store(d_initial + o_s, d, mask=inside)


@gluon.jit
def scan_back(shared, chunk_decay, at, n, d, FORM: gl.constexpr):
    """D at the chunk's start, in flight; D at its end and X are left in shared memory, rounded."""
    tiles, barriers, _ = shared
    STATE: gl.constexpr = product(FORM.K, 8)
    TOKENS: gl.constexpr = product(CHUNK, 8)
    TOKEN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    dtype: gl.constexpr = tiles.q.dtype
    row, keys = n % 2 * FACTORS, tiles.k.permute((1, 0))
    if FORM.DECAY:
        end = gl.load(chunk_decay + at.slot)
    low = d.to(dtype)
    tiles.d_states.store(low)
    left = gl.convert_layout(low, OF_TOKENS)
    mbarrier.wait(barriers.full.index(n % 2), (n // 2) & 1)
    y = gl.zeros([FORM.V, CHUNK], gl.float32, TOKENS)
    y = warpgroup_mma(left, keys, y, use_acc=False, is_async=True)
    if not FORM.SCORES:
        p = gl.zeros([CHUNK, CHUNK], gl.float32, halves(CHUNK))
        p = warpgroup_mma(tiles.q, keys, p, use_acc=False, is_async=True)
    mbarrier.wait(barriers.full_o.index(0), n & 1)
    d_o = tiles.d_o.permute((1, 0)).load(TOKENS)
    reads = tiles.factors.index(row + FACTOR.READS).load(TOKEN)[None, :]
    read = (d_o.to(gl.float32) * reads).to(dtype)
    if FORM.SCORES:
        y = warpgroup_mma_wait(0, deps=(y,))
        right = d_o
        if FORM.DECAY or FORM.UNIT:
            y *= tiles.factors.index(row + FACTOR.BARE_WRITES).load(TOKEN)[None, :]
    else:
        y, p = warpgroup_mma_wait(0, deps=(y, p))
        leave_scores(tiles, p)
        right = read
    y = warpgroup_mma(gl.convert_layout(right, OF_TOKENS), tiles.read_pairs, y, is_async=True)
    y = warpgroup_mma_wait(0, deps=(y,))
    if FORM.UNIT and not FORM.SCORES:
        y *= tiles.factors.index(row + FACTOR.BARE_WRITES).load(TOKEN)[None, :]
    if FORM.TIED:
        beta = tiles.factors.index(row + FACTOR.BETAS).load(TOKEN)[None, :]
        left = gl.convert_layout((y * beta).to(dtype), OF_TOKENS)
        y = warpgroup_mma(left, tiles.erase_pairs, y, is_async=True)
        y = warpgroup_mma_wait(0, deps=(y,))
    mbarrier.wait(barriers.took_values.index(0), (n & 1) ^ 1)
    tiles.d_errors.permute((1, 0)).store(y.to(dtype))
    if FORM.DECAY:
        d *= end
    d = warpgroup_mma(gl.convert_layout(read, OF_STATE), tiles.q, d, is_async=True)
    if FORM.TIED:
        erases = tiles.factors.index(row + FACTOR.ERASES).load(TOKEN)[None, :]
        left = gl.convert_layout((y * erases).to(dtype), OF_STATE)
        d = warpgroup_mma(left, tiles.k, d, is_async=True)
    fence_async_shared()
    if FORM.TIED:
        barrier()
    else:
        # A barrier of the role, too.
        mbarrier.arrive(barriers.has_values.index(0))
    return d


@gluon.jit
def leave_scores(tiles, p):
    """q . k on and below the diagonal, rounded, to where P would be."""
    LAYOUT: gl.constexpr = halves(CHUNK)
    o_i, o_j = grid(CHUNK, CHUNK, LAYOUT)
    tiles.read_pairs.store(gl.where(o_i >= o_j, p, 0.0).to(tiles.read_pairs.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def gradients(shared, d_beta, at, n, d, FORM: gl.constexpr):
    """dq, dk, dv and dbeta of the chunk, and sums of rows for its decays; D, done."""
    tiles, barriers, work = shared
    ACROSS: gl.constexpr = halves(FORM.K)
    pairs = gl.zeros([CHUNK, CHUNK], gl.float32, halves(CHUNK))
    nothing = gl.zeros([CHUNK, FORM.K], gl.float32, ACROSS)
    row, phase, errors = n % 2 * FACTORS, n & 1, tiles.errors.permute((1, 0))
    mbarrier.wait(barriers.full_e.index(0), phase)
    gp = warpgroup_mma(tiles.d_o, errors, pairs, use_acc=False, is_async=True)
    gm = gp
    if FORM.TIED:
        gm = warpgroup_mma(tiles.d_errors, errors, pairs, use_acc=False, is_async=True)
    mbarrier.wait(barriers.full_s.index(0), phase)
    read = warpgroup_mma(tiles.d_o, tiles.states, nothing, use_acc=False, is_async=True)
    erased = read
    if FORM.TIED:
        erased = warpgroup_mma(tiles.d_errors, tiles.states, nothing, use_acc=False, is_async=True)
        d, gp, gm = warpgroup_mma_wait(2, deps=(d, gp, gm))
        gm_diagonal = diagonal_halves(gm)
        store_beta_gradient(d_beta, tiles, row, at, work, gm_diagonal, FORM)
    else:
        d, gp = warpgroup_mma_wait(1, deps=(d, gp))
        gm = gp
    leave_pairs(tiles, row, gp, gm, FORM.TIED, FORM.DECAY)
    fence_async_shared()
    if FORM.TIED:
        read, erased = warpgroup_mma_wait(0, deps=(read, erased))
        erased *= row_factor(tiles, row + FACTOR.ERASES, ACROSS)
    else:
        read = warpgroup_mma_wait(0, deps=(read,))
    # Barriers of the role, too: GP and GM are there for all warps.
    mbarrier.arrive(barriers.empty_o.index(0))
    read *= row_factor(tiles, row + FACTOR.READS, ACROSS)
    read = warpgroup_mma(tiles.read_pairs, tiles.k, read, is_async=True)
    if FORM.TIED:
        erased = warpgroup_mma(tiles.erase_pairs, tiles.k, erased, is_async=True)
    written = warpgroup_mma(tiles.errors, tiles.d_states, nothing, use_acc=False, is_async=True)
    if FORM.DECAY:
        held = pairs
        for first in gl.static_range(0, FORM.V, CHUNK):
            right = tiles.states.slice(first, CHUNK).permute((1, 0))
            left = tiles.d_states.slice(first, CHUNK)
            held = warpgroup_mma(left, right, held, is_async=True)
    if FORM.TIED:
        leave_values(tiles, barriers, tiles.d_errors, row, 0)
    if FORM.TIED and FORM.DECAY:
        read, erased, written, held = warpgroup_mma_wait(0, deps=(read, erased, written, held))
    elif FORM.TIED:
        read, erased, written = warpgroup_mma_wait(0, deps=(read, erased, written))
    elif FORM.DECAY:
        read, written, held = warpgroup_mma_wait(0, deps=(read, written, held))
    else:
        read, written = warpgroup_mma_wait(0, deps=(read, written))
    mbarrier.arrive(barriers.empty_e.index(0))
    mbarrier.arrive(barriers.empty_s.index(0))
    written *= row_factor(tiles, row + FACTOR.WRITES, ACROSS)
    d_k = written
    if FORM.TIED:
        d_k = written + erased
    if FORM.DECAY:
        d_k += inner_with_sums(tiles, barriers, (read, written, erased, held), phase, FORM)
    else:
        d_k = warpgroup_mma(tiles.read_pairs.permute((1, 0)), tiles.q, d_k, is_async=True)
        if FORM.TIED:
            d_k = warpgroup_mma(tiles.erase_pairs.permute((1, 0)), tiles.k, d_k, is_async=True)
        d_k = warpgroup_mma_wait(0, deps=(d_k,))
    q_norm = gl.zeros([CHUNK, 1], gl.float32, ACROSS)
    k_norm = q_norm
    if FORM.UNIT:
        q_norm = row_factor(tiles, row + FACTOR.QUERY_NORM, ACROSS)
        k_norm = row_factor(tiles, row + FACTOR.KEY_NORM, ACROSS)
    leave_keys(tiles, barriers, read, d_k, q_norm, k_norm, FORM.UNIT)
    return d


@gluon.jit
def inner_with_sums(tiles, barriers, of, phase, FORM: gl.constexpr):
    """GP^T q + GM^T k and, while it is in flight, the sums of rows for dlog_decay."""
    read, written, erased, held = of
    ACROSS: gl.constexpr = halves(FORM.K)
    inner = gl.zeros([CHUNK, FORM.K], gl.float32, ACROSS)
    turned = tiles.read_pairs.permute((1, 0))
    inner = warpgroup_mma(turned, tiles.q, inner, use_acc=False, is_async=True)
    if FORM.TIED:
        inner = warpgroup_mma(tiles.erase_pairs.permute((1, 0)), tiles.k, inner, is_async=True)
    mbarrier.wait(barriers.took_sums.index(0), phase ^ 1)
    tiles.sums.index(SUM.HELD).store(diagonal_halves(held))
    q = tiles.q.load(ACROSS).to(gl.float32)
    tiles.sums.index(SUM.QUERIES).store(sums_of_halves(q * read, FORM.K))
    k = tiles.k.load(ACROSS).to(gl.float32)
    tiles.sums.index(SUM.WRITES).store(sums_of_halves(k * written, FORM.K))
    inner = warpgroup_mma_wait(0, deps=(inner,))
    if FORM.TIED:
        later = erased - inner
    else:
        later = 0.0 - inner
    tiles.sums.index(SUM.KEYS).store(sums_of_halves(k * later, FORM.K))
    mbarrier.arrive(barriers.has_sums.index(0))
    return inner


GENERAL = ["heads", "per_segment", "T", "s_decay_b", "s_decay_t", "s_decay_h"]


@gluon.jit(do_not_specialize=GENERAL)
def fused_backward_kernel(
    q, k, d_o, errors, states, lower_states, scores, corrections, d_q, d_k, d_v, scalings, norms,
    chunk_decay, d_beta, log_decay, d_log_decay, d_final, d_initial, cu_seqlens, scale, heads,
    per_segment, T, s_decay_b, s_decay_t, s_decay_h, FORM: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors of tiles up to d_v; without an erase `errors` is v. States are [WIDTH, KEYS].

    CUT: programs go through segments, from the gradients by the states at their ends.
    """
    log_decay, chunk_decay = present(log_decay, d_initial), present(chunk_decay, d_initial)
    d_log_decay, d_beta = present(d_log_decay, d_initial), present(d_beta, d_initial)
    scalings, norms = present(scalings, d_initial), present(norms, d_initial)
    work, sequence = stretch_of(present(cu_seqlens, T), T, heads, per_segment, FORM)
    tiles = new_tiles(q.dtype, FORM)
    barriers = Barriers(new_barrier(2, 2), new_barrier(2, 1), *single_barriers(11))
    SIZE: gl.constexpr = FORM.WIDTH * FORM.KEYS
    if not FORM.FINAL:
        d_final = d_initial
    else:
        d_final += gl.program_id(0).to(gl.int64) * SIZE
    d_initial += (sequence * heads + work.head).to(gl.int64) * SIZE
    barrier()
    shared = tiles, barriers, work
    lower_states, scores = present(lower_states, q), present(scores, q)
    loads = q, k, d_o, errors, states, lower_states, scores, present(corrections, q)
    decays = log_decay, d_log_decay, chunk_decay, T, s_decay_b, s_decay_t, s_decay_h
    gl.warp_specialize(
        [
            (compute_role, (shared, (d_final, d_initial, chunk_decay, d_beta), FORM)),
            (load_role, (shared, loads, FORM)),
            (store_role, (shared, (d_q, d_k, d_v), FORM)),
            (factor_role, (shared, scalings, norms, scale, FORM)),
            (decay_role, (shared, decays, FORM)),
        ],
        [1, 1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )
    end_barriers(barriers)
