"""The gradients of chunks with a decay per channel as one kernel of several roles, for Hopper.

Its equations are those of triton/channel_gradients_fast.py. With c_i the sum of base-2 log decays
from the chunk's start to token i, plus SHIFT, beta and the norms are in the pairs and not in k:

    x_i = q_i 2^c_i      u_i = k_i 2^c_i      y_j = k_j 2^-c_j      end = 2^c_end D^T E, times beta

    read = 2^-SHIFT scale S^T dO + GP y           dq = 2^c read
    row  = -2^-SHIFT beta S^T X + GM y            dk = 2^c row + 2^-c col
    col  = end + GP^T x + GM^T u
    z    = x read + u row - y col
    dlog_decay_t = sum_{i >= t} z_i + sum_j y_j end_j + decay sum_v D S

A program takes every n-th pair of a chunk and a head:

    load ---- dO E X D S q k --+--> compute ---+-- dq, dk (over x, u) ---> store
              log decays ------+    (8 warps)  +-- z_i (over y, GP, GM) --> adds up, stores
                |    sums <----+               +-- dbeta, to global memory
                +----> c       |
    factors of rows -----------+

z_i is what dlog_decay is summed of, in float32. Every tile has one place, and is fetched again as
soon as it has been used. The products with S and D come first, because q and k, whose places dq and
dk leave last, come last. Chunks whose decays go too far are written again by other kernels
(triton/channel_flagged.py).
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

from deltarule.ops.delta_rule.gluon.channel_memory import SHIFT, UNSHIFT
from deltarule.ops.delta_rule.gluon.gates import LOG2_E, add
from deltarule.ops.delta_rule.gluon.gradient_memory import (
    FACTOR,
    FACTORS,
    Work,
    halves,
    pair_of,
    pairs_there,
)
from deltarule.ops.delta_rule.gluon.gradients import (
    diagonal_halves,
    factor_role,
    leave_pairs,
    row_factor,
    store_beta_gradient,
)
from deltarule.ops.delta_rule.gluon.inverse import PLAIN, PLAIN_1D, four, joined
from deltarule.ops.delta_rule.gluon.memory import CHUNK, single_barriers
from deltarule.ops.delta_rule.gluon.movers import load, load_rows, room, store
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, new_barrier, present, square

# Rows and channels that a lane adds up together: the rows of a tile are swizzled by eights.
EIGHT, CHANNELS = gl.constexpr(8), gl.constexpr(64)
# Parts of a sum over all tokens.
PARTS = gl.constexpr(16)

# Tiles in shared memory, one of each; the factors of rows and 2^c_end have two slots.
Tiles = namedtuple(
    "Tiles",
    # [64, V].
    "d_o errors d_errors "
    # [V, K].
    "states d_states "
    # [64, K]: q and k, then x and u, then dq and dk.
    "q k "
    # [64, K]: y; [64, 64]: GP and GM. In the place of all three, [64, K] float32, z, and then
    # dlog_decay.
    "near read_pairs erase_pairs totals "
    # [64, K] float32: log decays, and in their place c.
    "decays "
    # [2, K] float32, and [2 * FACTORS, 64] float32.
    "ends factors "
    # [K, 2] float32: of each channel the sum over v of D S, in one of the two, and 0; and
    # [PARTS, K] float32, that of y end over some of the tokens.
    "held parts",
)

# What is there, and what may be overwritten.
Barriers = namedtuple(
    "Barriers",
    # The factors of rows, of two slots.
    "full empty "
    # dO, E and X; S and D; all five are free.
    "full_o full_s empty_o "
    # Log decays are there; c is; neither is needed any more.
    "full_g has_sums empty_g "
    # q and k are there; dq, dk and z are; dq and dk are in global memory; dlog_decay is.
    "full_k has_keys empty_k empty_z",
)


@gluon.jit
def new_tiles(dtype: gl.constexpr, FORM: gl.constexpr):
    """Shared memory for all tiles; those of products are behind an index (`of_chunk`)."""
    SQUARE: gl.constexpr = square()
    d_o = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.V], SQUARE)
    errors = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.V], SQUARE)
    d_errors = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.V], SQUARE) if FORM.TIED else errors
    states = gl.allocate_shared_memory(dtype, [1, FORM.V, FORM.K], SQUARE)
    d_states = gl.allocate_shared_memory(dtype, [1, FORM.V, FORM.K], SQUARE)
    q = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.K], SQUARE)
    k = gl.allocate_shared_memory(dtype, [1, CHUNK, FORM.K], SQUARE)
    near = gl.allocate_shared_memory(dtype, [2, CHUNK, FORM.K], SQUARE)
    decays = gl.allocate_shared_memory(gl.float32, [CHUNK, FORM.K], square(2, 32))
    ends = gl.allocate_shared_memory(gl.float32, [2, FORM.K], PLAIN_1D)
    factors = gl.allocate_shared_memory(gl.float32, [2 * FACTORS, CHUNK], PLAIN_1D)
    held = gl.allocate_shared_memory(gl.float32, [FORM.K, 2], PLAIN)
    parts = gl.allocate_shared_memory(gl.float32, [PARTS, FORM.K], PLAIN)
    return Tiles(
        d_o, errors, d_errors, states, d_states, q, k, near, near, near, near, decays, ends,
        factors, held, parts,
    )  # fmt: skip


@gluon.jit
def of_chunk(tiles, n):
    """The only tiles, by an index that the compiler does not know, as in channel_memory.py."""
    only, near = n >> 30, tiles.near
    K: gl.constexpr = near.shape[2]
    totals = near._reinterpret(gl.float32, [1, CHUNK, K], square(2, 32)).index(only)
    pairs = near.index(only + 1)._reinterpret(near.dtype, [K // CHUNK, CHUNK, CHUNK], square())
    return Tiles(
        tiles.d_o.index(only), tiles.errors.index(only), tiles.d_errors.index(only),
        tiles.states.index(only), tiles.d_states.index(only), tiles.q.index(only),
        tiles.k.index(only), near.index(only), pairs.index(0), pairs.index(1), totals, tiles.decays,
        tiles.ends, tiles.factors, tiles.held, tiles.parts,
    )  # fmt: skip


@gluon.jit
def load_role(shared, of, FORM: gl.constexpr):
    """One warp: every tile to its place, in the order in which places become free."""
    tiles, barriers, work = shared
    tiles = of_chunk(tiles, 0)
    q, k, d_o, errors, d_errors, states, d_states, log_decay = of
    done = 0
    for n in range(work.count):
        at = pair_of(n, work, FORM)
        if at.left > 0:
            once, row, column = (done & 1) ^ 1, at.slot * CHUNK, 0
            SIZE: gl.constexpr = CHUNK * FORM.V * (6 if FORM.TIED else 4)
            full = room(barriers.full_o, barriers.empty_o, once, SIZE)
            load(d_o, at.token, at.head * FORM.V, at.left, full, tiles.d_o, FORM.ENDS)
            if FORM.TIED:
                load(d_errors, row, column, at.left, full, tiles.d_errors, FORM.ENDS)
            else:
                row, column = at.token, at.head * FORM.V
            load(errors, row, column, at.left, full, tiles.errors, FORM.ENDS)
            full = barriers.full_s.index(0)
            mbarrier.expect(full, FORM.V * FORM.K * 4)
            load_rows(d_states, at.slot * FORM.V, full, tiles.d_states)
            load_rows(states, at.slot * FORM.V, full, tiles.states)
            column = at.head * FORM.K
            full = room(barriers.full_g, barriers.empty_g, once, CHUNK * FORM.K * 4)
            load(log_decay, at.token, column, at.left, full, tiles.decays, FORM.ENDS)
            full = room(barriers.full_k, barriers.empty_k, once, CHUNK * FORM.K * 4)
            load(k, at.token, column, at.left, full, tiles.k, FORM.ENDS)
            load(q, at.token, column, at.left, full, tiles.q, FORM.ENDS)
            done += 1


@gluon.jit
def store_role(shared, of, FORM: gl.constexpr):
    """One warp: dq and dk of every pair; dlog_decay, which it adds up; their places are free."""
    tiles, barriers, work = shared
    tiles = of_chunk(tiles, 0)
    d_q, d_k, d_log_decay = of
    done = 0
    for n in range(work.count):
        at = pair_of(n, work, FORM)
        if at.left > 0:
            mbarrier.wait(barriers.has_keys.index(0), done & 1)
            store(d_q, at.token, at.head * FORM.K, at.left, tiles.q, FORM.ENDS)
            store(d_k, at.token, at.head * FORM.K, at.left, tiles.k, FORM.ENDS)
            leave_totals(tiles, done % 2, 0)
            tma.store_wait(0)
            mbarrier.arrive(barriers.empty_k.index(0))
            leave_totals(tiles, done % 2, CHANNELS)
            fence_async_shared()
            barrier()
            store(d_log_decay, at.token, at.head * FORM.K, at.left, tiles.totals, FORM.ENDS)
            tma.store_wait(0)
            mbarrier.arrive(barriers.empty_z.index(0))
            done += 1


@gluon.jit
def leave_totals(tiles, slot, FIRST: gl.constexpr):
    """dlog_decay of 64 channels in the place of z, from the last token on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([EIGHT, 2], [1, 32], [1, 1], [1, 0])
    LANES: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    held = tiles.held.slice(FIRST, CHANNELS).load(gl.BlockedLayout([2, 2], [32, 1], [1, 1], [1, 0]))
    ends = tiles.ends.index(slot).slice(FIRST, CHANNELS).load(LANES)
    z = gl.convert_layout(gl.sum(held, 1), LANES) * ends * UNSHIFT
    for row in gl.static_range(0, PARTS, EIGHT):
        z += gl.sum(tiles.parts.slice(row, EIGHT).slice(FIRST, CHANNELS, 1).load(LAYOUT), 0)
    totals = tiles.totals.slice(FIRST, CHANNELS, 1)
    for row in gl.static_range(CHUNK - EIGHT, -1, -EIGHT):
        tile = totals.slice(row, EIGHT)
        x = gl.permute(gl.reshape(tile.load(LAYOUT), [2, EIGHT // 2, CHANNELS]), (1, 2, 0))
        before, after = gl.split(x)
        after, z = from_the_last(after, z)
        before, z = from_the_last(before, z)
        x = gl.reshape(gl.permute(gl.join(before, after), (2, 0, 1)), [EIGHT, CHANNELS])
        tile.store(gl.convert_layout(x, LAYOUT))


@gluon.jit
def from_the_last(x, z):
    """Of four rows each with those after it, and z, added; and the first."""
    rows = four(gl.permute(gl.reshape(x, [2, 2, CHANNELS]), (2, 0, 1)))
    z = rows[3] + gl.convert_layout(z, rows[3].type.layout)
    after = rows[2] + z
    before = rows[1] + after
    first = rows[0] + before
    sums = gl.permute(joined((first, before, after, z)), (1, 2, 0))
    return gl.convert_layout(gl.reshape(sums, [4, CHANNELS]), x.type.layout), first


@gluon.jit
def sum_role(shared, FORM: gl.constexpr):
    """One warp: c in the place of the log decays, and 2^c of the last token."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([EIGHT, 2], [1, 32], [1, 1], [1, 0])
    tiles, barriers, work = shared
    done = 0
    for n in range(work.count):
        at = pair_of(n, work, FORM)
        if at.left > 0:
            mbarrier.wait(barriers.full_g.index(0), done & 1)
            slot = done % 2
            for first in gl.static_range(0, FORM.K, CHANNELS):
                # A lane has two channels.
                decays = tiles.decays.slice(first, CHANNELS, 1)
                c = gl.zeros([CHANNELS], gl.float32, gl.SliceLayout(0, LAYOUT)) + SHIFT
                for row in gl.static_range(0, CHUNK, EIGHT):
                    tile = decays.slice(row, EIGHT)
                    x = tile.load(LAYOUT) * LOG2_E
                    tile.store(gl.associative_scan(x, 0, add) + c[None, :])
                    c += gl.sum(x, 0)
                tiles.ends.index(slot).slice(first, CHANNELS).store(gl.exp2(c))
            fence_async_shared()
            mbarrier.arrive(barriers.has_sums.index(0))
            done += 1


@gluon.jit
def compute_role(shared, d_beta, FORM: gl.constexpr):
    """8 warps, those of the upper half for the upper half of all columns: all but what moves."""
    ACROSS: gl.constexpr = halves(FORM.K)
    all_tiles, barriers, work = shared
    count = work.count
    if FORM.ENDS == "packed":
        count = pairs_there(work)
    for n in range(count):
        at, tiles = pair_of(n, work, FORM), of_chunk(all_tiles, n)
        read, erased, written = around((tiles, barriers, work), d_beta, at, n, FORM)
        mbarrier.wait(barriers.has_sums.index(0), n & 1)
        mbarrier.wait(barriers.full_k.index(0), n & 1)
        lead = leave_copies(tiles, FORM)
        fence_async_shared()
        # Barriers of the role, too: the copies, and GP and GM, are there for all warps.
        mbarrier.arrive(barriers.empty_g.index(0))
        read, erased, col = inside(tiles, read, erased, written, n, FORM)
        z = tiles.q.load(ACROSS).to(gl.float32) * read
        z -= tiles.near.load(ACROSS).to(gl.float32) * col
        # 1 / lead, of the precision of a power of two.
        d_k = col * gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [lead], dtype=gl.float32, is_pure=True, pack=1
        )
        if FORM.TIED:
            z += tiles.k.load(ACROSS).to(gl.float32) * erased
            d_k += lead * erased
        # No product reads what lies there any more.
        barrier()
        tiles.totals.store(z)
        tiles.q.store((lead * read).to(tiles.q.dtype))
        tiles.k.store(d_k.to(tiles.k.dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.has_keys.index(0))


@gluon.jit
def around(shared, d_beta, at, n, FORM: gl.constexpr):
    """dO S, X S and E D, scaled by the factors of rows; GP and GM, and sums of D S, to shared
    memory."""
    tiles, barriers, work = shared
    ACROSS: gl.constexpr = halves(FORM.K)
    nothing = gl.zeros([CHUNK, FORM.K], gl.float32, ACROSS)
    pairs = gl.zeros([CHUNK, CHUNK], gl.float32, halves(CHUNK))
    row, errors = n % 2 * FACTORS, tiles.errors.permute((1, 0))
    mbarrier.wait(barriers.full_o.index(0), n & 1)
    gp = warpgroup_mma(tiles.d_o, errors, pairs, use_acc=False, is_async=True)
    gm = gp
    if FORM.TIED:
        gm = warpgroup_mma(tiles.d_errors, errors, pairs, use_acc=False, is_async=True)
    mbarrier.wait(barriers.full_s.index(0), n & 1)
    written = warpgroup_mma(tiles.errors, tiles.d_states, nothing, use_acc=False, is_async=True)
    read = warpgroup_mma(tiles.d_o, tiles.states, nothing, use_acc=False, is_async=True)
    erased = read
    if FORM.TIED:
        erased = warpgroup_mma(tiles.d_errors, tiles.states, nothing, use_acc=False, is_async=True)
    lower = held_by(tiles, pairs, 0)
    upper = held_by(tiles, pairs, CHUNK)
    mbarrier.wait(barriers.full.index(n % 2), (n // 2) & 1)
    if FORM.TIED:
        gp, gm = warpgroup_mma_wait(5, deps=(gp, gm))
        store_beta_gradient(d_beta, tiles, row, at, work, diagonal_halves(gm), FORM)
    else:
        gp = warpgroup_mma_wait(4, deps=(gp,))
        gm = gp
    mbarrier.wait(barriers.empty_z.index(0), (n & 1) ^ 1)
    leave_pairs(tiles, row, gp, gm, FORM.TIED, False)
    if FORM.TIED:
        written, read, erased, lower, upper = warpgroup_mma_wait(
            0, deps=(written, read, erased, lower, upper)
        )
        erased *= row_factor(tiles, row + FACTOR.ERASES, ACROSS) * UNSHIFT
    else:
        written, read, lower, upper = warpgroup_mma_wait(0, deps=(written, read, lower, upper))
        erased = read
    mbarrier.arrive(barriers.empty_o.index(0))
    tiles.held.slice(0, CHUNK).store(diagonal_halves(lower))
    tiles.held.slice(CHUNK, CHUNK).store(diagonal_halves(upper))
    written *= row_factor(tiles, row + FACTOR.WRITES, ACROSS)
    read *= row_factor(tiles, row + FACTOR.READS, ACROSS) * UNSHIFT
    mbarrier.arrive(barriers.empty.index(n % 2))
    return read, erased, written


@gluon.jit
def held_by(tiles, zero, FIRST: gl.constexpr):
    """S^T D of 64 channels, in flight: its diagonal is wanted."""
    left = tiles.states.slice(FIRST, CHUNK, 1).permute((1, 0))
    right = tiles.d_states.slice(FIRST, CHUNK, 1)
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def leave_copies(tiles, FORM: gl.constexpr):
    """x, u in the places of q and k, and y; returns 2^c."""
    ACROSS: gl.constexpr = halves(FORM.K)
    dtype: gl.constexpr = tiles.q.dtype
    c = tiles.decays.load(ACROSS)
    lead = gl.exp2(c)
    tiles.q.store((tiles.q.load(ACROSS).to(gl.float32) * lead).to(dtype))
    k = tiles.k.load(ACROSS).to(gl.float32)
    tiles.near.store((k * gl.exp2(-c)).to(dtype))
    if FORM.TIED:
        tiles.k.store((k * lead).to(dtype))
    return lead


@gluon.jit
def inside(tiles, read, erased, written, n, FORM: gl.constexpr):
    """read, row and col with their pairs; and parts of the sums of y end."""
    ACROSS: gl.constexpr = halves(FORM.K)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, ACROSS)
    col = gl.zeros([CHUNK, FORM.K], gl.float32, ACROSS)
    turned = tiles.read_pairs.permute((1, 0))
    col = warpgroup_mma(turned, tiles.q, col, use_acc=False, is_async=True)
    read = warpgroup_mma(tiles.read_pairs, tiles.near, read, is_async=True)
    if FORM.TIED:
        turned = tiles.erase_pairs.permute((1, 0))
        col = warpgroup_mma(turned, tiles.k, col, is_async=True)
        erased = warpgroup_mma(tiles.erase_pairs, tiles.near, erased, is_async=True)
    end = written * tiles.ends.index(n % 2).load(CHANNEL)[None, :]
    # Two of a lane's rows and of two lanes are one; the rest of the sum is for a warp with time.
    held = gl.reshape(tiles.near.load(ACROSS).to(gl.float32) * end, [PARTS // 4, 2, 2, 4, FORM.K])
    tiles.parts.store(gl.reshape(gl.sum(gl.sum(held, 1), 1), [PARTS, FORM.K]))
    if FORM.TIED:
        col, read, erased = warpgroup_mma_wait(0, deps=(col, read, erased))
    else:
        col, read = warpgroup_mma_wait(0, deps=(col, read))
        erased = read
    return read, erased, col + end


GENERAL = ["pairs", "heads", "chunks", "sequences", "T"]


@gluon.jit(do_not_specialize=GENERAL)
def channel_gradients_kernel(
    q, k, d_o, errors, d_errors, states, d_states, log_decay, d_q, d_k, d_log_decay, scalings,
    norms, d_beta, cu_seqlens, sequences, scale, pairs, heads, chunks, T, FORM: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors of tiles up to d_log_decay; without an erase `errors` is v, and X is not read."""
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (pairs - first + step - 1) // step
    cu_seqlens, sequences = present(cu_seqlens, T), present(sequences, T)
    work = Work(first, step, count, heads, chunks, 0, chunks, chunks, T, cu_seqlens, sequences)
    tiles = new_tiles(q.dtype, FORM)
    barriers = Barriers(new_barrier(2, 1), new_barrier(2, 1), *single_barriers(10))
    barrier()
    shared = tiles, barriers, work
    loads = q, k, d_o, errors, d_errors, states, d_states, log_decay
    gl.warp_specialize(
        [
            (compute_role, (shared, present(d_beta, T), FORM)),
            (load_role, (shared, loads, FORM)),
            (store_role, (shared, (d_q, d_k, d_log_decay), FORM)),
            (factor_role, (shared, present(scalings, T), present(norms, T), scale, FORM)),
            (sum_role, (shared, FORM)),
        ],
        [1, 1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )
    end_barriers(barriers)
