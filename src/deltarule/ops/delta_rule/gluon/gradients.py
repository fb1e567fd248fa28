"""The gradients of chunks as one kernel of several roles, for Hopper: decay none or per head.

Its equations are those of triton/gradients.py. A program takes every n-th pair of a chunk and a key
head, and of each the value heads in turn:

    load ---- dO E X --+                         +-- dv (over X) ----> store
              D S q k -+--> slots --> compute ---+-- dq, dk (over q, k)
    factors -----------+                         +-- dbeta, to global memory
                                                 +-- sums of rows --------> decays, dlog_decay

dO, E, X and the factors of rows have two slots each, and everything is fetched again as soon as it
has been used: at any time something is on its way. The compute role has 8 warps, those of the upper
half for the upper half of all columns; sums over the channels of a row come as two. Every product
has both operands in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.delta_rule.gluon.gates import add
from deltarule.ops.delta_rule.gluon.gradient_memory import (
    FACTOR,
    FACTORS,
    Barriers,
    Work,
    halves,
    load_role,
    new_tiles,
    pair_of,
    pairs_there,
    place_of_gates,
    places_of_rows,
    store_role,
)
from deltarule.ops.delta_rule.gluon.memory import CHUNK, grid, single_barriers
from deltarule.ops.delta_rule.gluon.score import NOTHING
from deltarule.ops.delta_rule.triton.tiles import RESET, SCALING, SCALINGS, SUM
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, new_barrier, present

# A sum of decays after the end of a sequence.
LONG_AFTER = gl.constexpr(-1e30)


@gluon.jit
def factor_role(shared, scalings, norms, scale, FORM: gl.constexpr):
    _, _, work = shared
    done = 0
    for n in range(work.count * FORM.GROUP):
        at = pair_of(n, work, FORM)
        if at.left > 0:
            leave_factors(shared, scalings, norms, scale, at, done, FORM)
            done += 1


@gluon.jit
def leave_factors(shared, scalings, norms, scale, at, n, FORM: gl.constexpr):
    tiles, barriers, work = shared
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LAYOUT)
    one = gl.zeros([CHUNK], gl.float32, LAYOUT) + 1.0
    slot, phase = n % 2, (n // 2) & 1
    if FORM.TIED or FORM.DECAY:
        own = (at.slot // FORM.PER_GATE).to(gl.int64)
        scaling = scalings + own * (SCALINGS * CHUNK) + o_t
    beta, query, key = one, one * scale, one
    if FORM.TIED:
        beta = load_factor(scaling + SCALING.BETA * CHUNK, o_t, at.left, 0.0, FORM.ENDS)
    if FORM.UNIT:
        heads, head = work.heads // FORM.HALVES, at.head // FORM.HALVES
        norm = norms + ((at.token + o_t) * heads + head) * 2
        query_norm = load_factor(norm, o_t, at.left, 0.0, FORM.ENDS)
        key = load_factor(norm + 1, o_t, at.left, 0.0, FORM.ENDS)
        query *= query_norm
    reads, erases, writes = query, key, key
    if FORM.DECAY:
        reads = load_factor(scaling + SCALING.READ * CHUNK, o_t, at.left, 0.0, FORM.ENDS)
        erases = load_factor(scaling + SCALING.ERASE * CHUNK, o_t, at.left, 0.0, FORM.ENDS)
        writes = load_factor(scaling + SCALING.WRITE * CHUNK, o_t, at.left, 0.0, FORM.ENDS)
        # After the end nothing is left of any token before, and no power is infinite.
        whole = load_factor(scaling + SCALING.WHOLE * CHUNK, o_t, at.left, LONG_AFTER, FORM.ENDS)
        rest = load_factor(scaling + SCALING.REST * CHUNK, o_t, at.left, 0.0, FORM.ENDS)
    mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
    row = slot * FACTORS
    tiles.factors.index(row + FACTOR.READS).store(reads)
    tiles.factors.index(row + FACTOR.ERASES).store(-erases * beta)
    tiles.factors.index(row + FACTOR.WRITES).store(writes * beta)
    tiles.factors.index(row + FACTOR.QUERY).store(query)
    tiles.factors.index(row + FACTOR.KEY).store(key * beta)
    tiles.factors.index(row + FACTOR.BETAS).store(beta)
    tiles.factors.index(row + FACTOR.BARE_WRITES).store(writes)
    if FORM.UNIT:
        tiles.factors.index(row + FACTOR.QUERY_NORM).store(query_norm * query_norm)
        tiles.factors.index(row + FACTOR.KEY_NORM).store(key * key)
    if FORM.DECAY:
        tiles.factors.index(row + FACTOR.WHOLES).store(whole)
        tiles.factors.index(row + FACTOR.RESTS).store(rest)
    if FORM.ENDS == "packed":
        place = place_of_gates(at, work, o_t, FORM)
        place = gl.where(o_t < at.left, place, -1)
        tiles.factors.index(row + FACTOR.PLACES).store(place.to(gl.float32, bitcast=True))
    mbarrier.arrive(barriers.full.index(slot))


@gluon.jit
def load_factor(x, row, rows, other: gl.constexpr, ENDS: gl.constexpr):
    """Factors of 64 rows; another after the chunk's end."""
    if ENDS == "whole":
        found = gl.load(x)
    else:
        found = gl.load(x, mask=row < rows, other=other)
    return found


@gluon.jit
def decay_role(shared, of, FORM: gl.constexpr):
    """One warp: dlog_decay, of rows from a token on, of rows before it, and of what S held."""
    _, _, work = shared
    if FORM.DECAY:
        done = 0
        for n in range(work.count * FORM.GROUP):
            at = pair_of(n, work, FORM)
            if at.left > 0:
                leave_decay_gradients(shared, of, at, done, FORM)
                done += 1


@gluon.jit
def leave_decay_gradients(shared, of, at, n, FORM: gl.constexpr):
    tiles, barriers, work = shared
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LINE)
    log_decay, d_log_decay, chunk_decay, T, s_batch, s_token, s_head = of
    gate = at.value_head // FORM.PER_GATE
    row = (at.token // T).to(gl.int64) * s_batch + gate * s_head
    g = load_factor(log_decay + row + (at.token % T + o_t) * s_token, o_t, at.left, 0.0, FORM.ENDS)
    whole = gl.load(chunk_decay + at.slot // FORM.PER_GATE)
    mbarrier.wait(barriers.has_sums.index(0), n & 1)
    later = sum_of_row(tiles, SUM.QUERIES, LINE) + sum_of_row(tiles, SUM.KEYS, LINE)
    before = sum_of_row(tiles, SUM.WRITES, LINE)
    held = whole * gl.sum(sum_of_row(tiles, SUM.HELD, LINE), 0)
    mbarrier.arrive(barriers.took_sums.index(0))
    x = gl.associative_scan(later, 0, add, reverse=True) + held
    x += gl.associative_scan(before, 0, add) - before
    address = d_log_decay + place_of_gates(at, work, o_t, FORM)
    x = with_those_before(x, address, o_t < at.left, at, FORM)
    x = gl.where(g < RESET, 0.0, x)
    if FORM.ENDS == "whole":
        gl.store(address, x)
    else:
        gl.store(address, x, mask=o_t < at.left)


@gluon.jit
def with_those_before(x, address, there, at, FORM: gl.constexpr):
    """x, and what the same threads have left there of the gate's value heads before this one."""
    if FORM.PER_GATE * FORM.HALVES > 1:
        there = there & (at.value_head % FORM.PER_GATE + at.head % FORM.HALVES > 0)
        x += gl.load(address, mask=there, other=0.0).to(gl.float32)
    return x


@gluon.jit
def sum_of_row(tiles, of, LINE: gl.constexpr):
    """A sum of every row, over both halves."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 2], [32, 1], [1, 1], [1, 0])
    return gl.convert_layout(gl.sum(tiles.sums.index(of).load(LAYOUT), 1), LINE)


@gluon.jit
def sums_of_halves(x, COLUMNS: gl.constexpr):
    """Sums over each half of the columns of x [64, COLUMNS]: [64, 2]."""
    return gl.sum(gl.reshape(x, [CHUNK, 2, COLUMNS // 2]), 2)


@gluon.jit
def diagonal_halves(x):
    """The diagonal of x [64, 64], each number in the half of the columns where it is, else 0."""
    LAYOUT: gl.constexpr = x.type.layout
    o_i, o_j = grid(CHUNK, CHUNK, LAYOUT)
    return sums_of_halves(gl.where(o_i == o_j, x, 0.0), CHUNK)


@gluon.jit
def leave_pairs(tiles, row, gp, gm, TIED: gl.constexpr, DECAY: gl.constexpr):
    """GP and GM of what dO . E and X . E are, rounded, to shared memory."""
    LAYOUT: gl.constexpr = halves(CHUNK)
    I: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    J: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    o_i, o_j = grid(CHUNK, CHUNK, LAYOUT)
    factor = gl.expand_dims(tiles.factors.index(row + FACTOR.KEY).load(J), 0)
    if DECAY:
        # What is left of token j at token i, where a pair is there; else 0.
        there = o_i >= o_j
        ratio = tiles.factors.index(row + FACTOR.WHOLES).load(I)[:, None]
        ratio = ratio - tiles.factors.index(row + FACTOR.WHOLES).load(J)[None, :]
        rest = tiles.factors.index(row + FACTOR.RESTS).load(I)[:, None]
        ratio += rest - tiles.factors.index(row + FACTOR.RESTS).load(J)[None, :]
        factor = gl.exp2(gl.where(there, ratio, NOTHING)) * factor
        gp = gp * factor
    else:
        gp = gl.where(o_i >= o_j, gp * factor, 0.0)
    gp *= tiles.factors.index(row + FACTOR.QUERY).load(I)[:, None]
    tiles.read_pairs.store(gp.to(tiles.read_pairs.dtype))
    if TIED:
        gm = gl.where(o_i > o_j, gm * factor, 0.0)
        gm *= -tiles.factors.index(row + FACTOR.KEY).load(I)[:, None]
        tiles.erase_pairs.store(gm.to(tiles.erase_pairs.dtype))


@gluon.jit
def row_factor(tiles, row, LAYOUT: gl.constexpr):
    return tiles.factors.index(row).load(gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def start_state_products(tiles, barriers, slot, n, zero, FORM: gl.constexpr):
    """Those with S and D, in flight: D^T w / beta, S^T dO, S^T X, and D S^T of 64 rows each."""
    d_o, errors = tiles.d_o.index(slot), tiles.errors.index(slot)
    mbarrier.wait(barriers.full_d.index(0), n & 1)
    written = warpgroup_mma(errors, tiles.d_states, zero, use_acc=False, is_async=True)
    mbarrier.wait(barriers.full_s.index(0), n & 1)
    read = warpgroup_mma(d_o, tiles.states, zero, use_acc=False, is_async=True)
    erased, held = read, read
    if FORM.TIED:
        d_errors = tiles.d_errors.index(slot)
        erased = warpgroup_mma(d_errors, tiles.states, zero, use_acc=False, is_async=True)
    if FORM.DECAY:
        held = gl.zeros([CHUNK, CHUNK], gl.float32, halves(CHUNK))
        for first in gl.static_range(0, FORM.V, CHUNK):
            right = tiles.states.slice(first, CHUNK).permute((1, 0))
            held = warpgroup_mma(tiles.d_states.slice(first, CHUNK), right, held, is_async=True)
    return written, read, erased, held


@gluon.jit
def store_beta_gradient(d_beta, tiles, row, at, work, x, FORM: gl.constexpr):
    """dbeta: x [64, 2] has each token's in the half where its column is."""
    LAYOUT: gl.constexpr = x.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    o_r, o_h = grid(CHUNK, 2, LAYOUT)
    there = o_r // (CHUNK // 2) == o_h
    if FORM.HALVES > 1:
        # Both halves of the keys come to the same.
        there = there & (at.head % FORM.HALVES == 0)
    place, there = places_of_rows(tiles, row, at, work, there, ROW, FORM)
    address = d_beta + place + o_h * 0
    gl.store(address, with_those_before(x, address, there, at, FORM), mask=there)


@gluon.jit
def leave_values(tiles, barriers, x, row, slot):
    """dv = beta X to where X was."""
    V: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // V, V // 8], [8, 1], [1, 0])
    d_v = x.load(LAYOUT).to(gl.float32) * row_factor(tiles, row + FACTOR.BETAS, LAYOUT)
    x.store(d_v.to(x.dtype))
    fence_async_shared()
    mbarrier.arrive(barriers.has_values.index(slot))


@gluon.jit
def compute_role(shared, d_beta, FORM: gl.constexpr):
    tiles, barriers, work = shared
    ACROSS: gl.constexpr = halves(FORM.K)
    keys = gl.zeros([CHUNK, FORM.K], gl.float32, ACROSS)
    count = work.count
    if FORM.ENDS == "packed":
        count = pairs_there(work, FORM.HALVES)
    # Not one loop over all value heads: where it sets sums back to zero, ptxas 12.8 dies of it.
    for pair in range(count):
        d_q, d_k = keys, keys
        q_norm = gl.zeros([CHUNK, 1], gl.float32, ACROSS)
        k_norm = q_norm
        for head in range(FORM.GROUP):
            at = pair, head, pair * FORM.GROUP + head
            read, written, erased, inner = of_value_head(shared, d_beta, at, keys, FORM)
            slot = (pair * FORM.GROUP + head) % 2
            if FORM.UNIT:
                q_norm = row_factor(tiles, slot * FACTORS + FACTOR.QUERY_NORM, ACROSS)
                k_norm = row_factor(tiles, slot * FACTORS + FACTOR.KEY_NORM, ACROSS)
            mbarrier.arrive(barriers.empty.index(slot))
            if FORM.DECAY:
                k, q = tiles.k.load(ACROSS).to(gl.float32), tiles.q.load(ACROSS).to(gl.float32)
                tiles.sums.index(SUM.QUERIES).store(sums_of_halves(q * read, FORM.K))
                tiles.sums.index(SUM.KEYS).store(sums_of_halves(k * (erased - inner), FORM.K))
                mbarrier.arrive(barriers.has_sums.index(0))
            written += erased + inner
            d_q, d_k = d_q + read, d_k + written
        # Of half of a row nobody knows the norm's gradient.
        WHOLE_ROWS: gl.constexpr = FORM.UNIT and FORM.HALVES == 1
        leave_keys(tiles, barriers, d_q, d_k, q_norm, k_norm, WHOLE_ROWS)


@gluon.jit
def of_value_head(shared, d_beta, at, keys, FORM: gl.constexpr):
    """dq, and dk in three parts: col from D, row, and col from GP and GM; dbeta and dv are stored.

    `keys` are zeros.
    """
    tiles, barriers, work = shared
    pair, head, n = at
    ACROSS: gl.constexpr = halves(FORM.K)
    # Products that start after those of pairs.
    LATER: gl.constexpr = 2 + (1 if FORM.TIED else 0) + (FORM.V // CHUNK if FORM.DECAY else 0)
    pairs = gl.zeros([CHUNK, CHUNK], gl.float32, halves(CHUNK))
    slot, place = n % 2, pair_of(n, work, FORM)
    row = slot * FACTORS
    mbarrier.wait(barriers.full.index(slot), (n // 2) & 1)
    errors = tiles.errors.index(slot).permute((1, 0))
    gp = warpgroup_mma(tiles.d_o.index(slot), errors, pairs, use_acc=False, is_async=True)
    gm = gp
    if FORM.TIED:
        gm = warpgroup_mma(tiles.d_errors.index(slot), errors, pairs, use_acc=False, is_async=True)
    sums = start_state_products(tiles, barriers, slot, n, keys, FORM)
    gp, gm = warpgroup_mma_wait(LATER, deps=(gp, gm))
    if FORM.TIED:
        gm_diagonal = diagonal_halves(gm)
        store_beta_gradient(d_beta, tiles, row, place, work, gm_diagonal, FORM)
    leave_pairs(tiles, row, gp, gm, FORM.TIED, FORM.DECAY)
    fence_async_shared()
    written, read, erased, held = warpgroup_mma_wait(0, deps=sums)
    # Barriers of the role, too: GP and GM are there for all warps.
    mbarrier.arrive(barriers.empty_d.index(0))
    mbarrier.arrive(barriers.empty_s.index(0))
    if FORM.DECAY:
        mbarrier.wait(barriers.took_sums.index(0), (n & 1) ^ 1)
        tiles.sums.index(SUM.HELD).store(diagonal_halves(held))
    written *= row_factor(tiles, row + FACTOR.WRITES, ACROSS)
    read *= row_factor(tiles, row + FACTOR.READS, ACROSS)
    if head == 0:
        mbarrier.wait(barriers.full_k.index(0), pair & 1)
    inner = keys
    if FORM.TIED:
        erased *= row_factor(tiles, row + FACTOR.ERASES, ACROSS)
    if not FORM.DECAY:
        # Nobody asks for the parts: one sum, in fewer registers.
        inner, written = written, keys
        if FORM.TIED:
            inner, erased = inner + erased, keys
    inner = warpgroup_mma(tiles.read_pairs.permute((1, 0)), tiles.q, inner, is_async=True)
    read = warpgroup_mma(tiles.read_pairs, tiles.k, read, is_async=True)
    if FORM.TIED:
        inner = warpgroup_mma(tiles.erase_pairs.permute((1, 0)), tiles.k, inner, is_async=True)
        if FORM.DECAY:
            erased = warpgroup_mma(tiles.erase_pairs, tiles.k, erased, is_async=True)
        else:
            inner = warpgroup_mma(tiles.erase_pairs, tiles.k, inner, is_async=True)
    if FORM.DECAY:
        k = tiles.k.load(ACROSS).to(gl.float32)
        tiles.sums.index(SUM.WRITES).store(sums_of_halves(k * written, FORM.K))
    if FORM.VALUES:
        leave_values(tiles, barriers, tiles.d_errors.index(slot), row, slot)
    if FORM.TIED and FORM.DECAY:
        inner, read, erased = warpgroup_mma_wait(0, deps=(inner, read, erased))
    else:
        inner, read = warpgroup_mma_wait(0, deps=(inner, read))
        erased = keys
    return read, written, erased, inner


@gluon.jit
def through_norm(x, d_x, norm):
    """dx <- dx - (x . dx) x / |x|^2, of dx already divided by |x|."""
    x = x.load(d_x.type.layout).to(gl.float32)
    return d_x - x * (gl.expand_dims(gl.sum(x * d_x, 1), 1) * norm)


@gluon.jit
def leave_keys(tiles, barriers, d_q, d_k, q_norm, k_norm, UNIT: gl.constexpr):
    """dq and dk to where q and k were, once all products have done with those."""
    if UNIT:
        d_q = through_norm(tiles.q, d_q, q_norm)
        d_k = through_norm(tiles.k, d_k, k_norm)
    barrier()
    tiles.q.store(d_q.to(tiles.q.dtype))
    tiles.k.store(d_k.to(tiles.k.dtype))
    fence_async_shared()
    mbarrier.arrive(barriers.has_keys.index(0))


GENERAL = ["pairs", "heads", "chunks", "before", "own_chunks", "all_chunks", "sequences"]
GENERAL += ["T", "s_decay_b", "s_decay_t", "s_decay_h"]


@gluon.jit(do_not_specialize=GENERAL)
def fused_gradients_kernel(
    q, k, d_o, errors, d_errors, states, upper, lower, d_q, d_k, d_v, scalings, norms, chunk_decay,
    d_beta, log_decay, d_log_decay, cu_seqlens, sequences, scale, pairs, heads, chunks, before,
    own_chunks, all_chunks, T, s_decay_b, s_decay_t, s_decay_h, FORM: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors of tiles up to d_v; without an erase `errors` is v, and X is not there.

    S and E are those of all chunks where they are KEPT, else like D and X those of these `chunks`.
    D is `upper`; or it is lent: 64 rows of a chunk's D lie where dq will, the others where dk will
    (`lower`), and X, if it is lent, lies where dv will. A program adds up what the PER_GATE value
    heads of a gate leave for it.
    """
    first, step = gl.program_id(0), gl.num_programs(0)
    count, heads = (pairs - first + step - 1) // step * FORM.HALVES, heads * FORM.HALVES
    cu_seqlens, sequences = present(cu_seqlens, T), present(sequences, T)
    work = Work(
        first, step, count, heads, chunks, before, own_chunks, all_chunks, T, cu_seqlens, sequences
    )
    tiles = new_tiles(q.dtype, FORM)
    full, empty = new_barrier(2, 2), new_barrier(2, 2 if FORM.VALUES else 1)
    barriers = Barriers(
        full, empty, new_barrier(1, 1), new_barrier(1, 1), new_barrier(1, 1), new_barrier(1, 1),
        new_barrier(1, 1), new_barrier(1, 1), new_barrier(2, 1), *single_barriers(3),
    )  # fmt: skip
    barrier()
    shared = tiles, barriers, work
    loads = q, k, d_o, errors, d_errors, states, upper, lower
    decays = log_decay, d_log_decay, chunk_decay, T, s_decay_b, s_decay_t, s_decay_h
    gl.warp_specialize(
        [
            (compute_role, (shared, d_beta, FORM)),
            (load_role, (shared, loads, FORM)),
            (store_role, (shared, (d_q, d_k, d_v), FORM)),
            (factor_role, (shared, scalings, norms, scale, FORM)),
            (decay_role, (shared, decays, FORM)),
        ],
        [1, 1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )
    end_barriers(barriers)
