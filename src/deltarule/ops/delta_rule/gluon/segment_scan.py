"""The scans over chunks of triton/scan.py as one kernel of several roles, for Hopper.

A program has 64 or 128 rows of the state of one stretch, a segment or a whole sequence, of a head,
and goes through its chunks: with GOAL "outputs" from the state at its start; "ends" from zeros, or
for A from the identity; "back" from the last chunk to the first, for D at its start.

    load ----- k v N, q P, and scalings of rows --> slots --> roles of 64 rows each --> o --> store

(P may be made there by a role of its own, where one of 64 rows is alone.)

    E = F + N beta F,  F = v - S e'        S <- S end + beta E y'       o = S q' + P beta E
    X = Y + N^T beta Y,  Y = P^T dO + D y'    D <- D end + dO q' - beta X e'

With a decay per head q', e' and y' are q, k and k times scalings of rows. With one per channel the
scores' kernels have left them, and `end` is a number for each channel.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltarule.ops.delta_rule.gluon.inverse import PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES, grid, product, straight
from deltarule.ops.delta_rule.gluon.movers import load_rows
from deltarule.ops.delta_rule.gluon.score import NOTHING, later
from deltarule.ops.delta_rule.triton.tiles import SCALING
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, new_barrier, present, square

# Tiles that the copy engine moves have a power of two of rows: scalings come two by two.
PAIRS = gl.constexpr(3)
# Where the decays of a chunk's channels lie, in the place of two scalings that they do without.
ENDS = gl.constexpr(0)

# y' are tiles of their own, or k again.
Tiles = namedtuple("Tiles", "q k write v scores corrections scalings o")
# Of slots; and o of a role is there, and in global memory.
# P that is made here is there.
Barriers = namedtuple("Barriers", "full empty written stored paired")
# What a program takes: first token, chunks and their first number, heads, first column of v.
#
# It `begins` with a given state and leaves one that is wanted (`ends`); `transition`: A and not S.
Work = namedtuple(
    "Work", "token chunks number head key_head value_heads column begins ends transition"
)
# What a kernel is compiled for: K keys and V values of a head, of which a program has PARTS of 64;
# SLOTS for chunks in shared memory. PLACES: outputs of the "first" stretches start and end as
# "ends" do, beside the ends of "later" ones, which then have outputs, too; or "all" at once.
# GIVEN: there are states to start from. DECAYED: decays are per channel, and q, k and write are q',
# e' and y'. MAKES: nobody has made P, and programs make it. HALVED: A is left as halves. FOLLOWS:
# the next kernel may start early.
ScanForm = namedtuple("ScanForm", "K V PARTS SLOTS GOAL PLACES GIVEN DECAYED MAKES HALVED FOLLOWS")


@gluon.jit
def work_of(heads, value_heads, per_stretch, T, FORM: gl.constexpr):
    """This program's work, its sequence, and the number of its stretch among those of all.

    The end of the last segment nobody needs, nor the first one's A; back that of the first.
    """
    ROWS: gl.constexpr = FORM.PARTS * VALUES
    TILES: gl.constexpr = FORM.V // ROWS
    program, chunks = gl.program_id(0), T // CHUNK
    tile, head, program = program % TILES, program // TILES % value_heads, program // TILES
    stretches = (chunks + per_stretch - 1) // per_stretch
    last, count = stretches - 1, stretches
    if FORM.GOAL == "ends":
        count = stretches + last - 2
    elif FORM.GOAL == "back":
        count = last
    if FORM.PLACES == "later":
        count -= 1
    elif FORM.PLACES == "first":
        count = 1
    sequence, place = program // value_heads // count, program // value_heads % count
    if FORM.PLACES == "later":
        place += 1
    transition = place >= stretches
    if FORM.GOAL == "ends":
        transition = place >= last
        place = gl.where(transition, place - last + 1, place)
    elif FORM.GOAL == "back":
        place += 1
    begins, ends = place == 0, place >= 0
    if FORM.GOAL == "outputs":
        begins = ends
        if FORM.PLACES != "first":
            ends = place == last
    elif FORM.GOAL == "back":
        begins = place == last
    first = place * per_stretch
    work = Work(
        sequence * T + first * CHUNK, gl.minimum(per_stretch, chunks - first),
        sequence * chunks + first, head, head // (value_heads // heads), value_heads,
        head * FORM.V + tile * ROWS, begins, ends, transition,
    )  # fmt: skip
    return work, sequence, sequence * stretches + place


@gluon.jit
def load_role(shared, of, FORM: gl.constexpr):
    """One warp: all tiles of a chunk to its slot."""
    tiles, barriers, work = shared
    q, k, write, v, scores, corrections, scalings, chunk_decay = of
    READS: gl.constexpr = 0 if FORM.GOAL == "ends" else 1
    KEYS: gl.constexpr = READS + (2 if FORM.DECAYED else 1)
    SQUARES: gl.constexpr = 1 if FORM.MAKES else READS + 1
    NUMBERS: gl.constexpr = 2 if FORM.DECAYED else PAIRS
    SIZE: gl.constexpr = CHUNK * ((KEYS * FORM.K + SQUARES * CHUNK) * 2 + 2 * NUMBERS * 4)
    for n in range(work.chunks):
        i, slot = work.chunks - 1 - n if FORM.GOAL == "back" else n, n % FORM.SLOTS
        full, token = barriers.full.index(slot), work.token + i * CHUNK
        number = (work.number + i) * work.value_heads + work.head
        mbarrier.wait(barriers.empty.index(slot), ((n // FORM.SLOTS) & 1) ^ 1)
        if work.transition:
            mbarrier.expect(full, SIZE)
        else:
            mbarrier.expect(full, SIZE + FORM.PARTS * CHUNK * VALUES * 2)
            for part in gl.static_range(FORM.PARTS):
                x = tiles.v.index(slot * FORM.PARTS + part)
                load_rows(v, token, full, x, work.column + part * VALUES)
        column, row = work.key_head * FORM.K, number * CHUNK
        if FORM.DECAYED:
            column, token = 0, row
            load_rows(write, row, full, tiles.write.index(slot))
        load_rows(k, token, full, tiles.k.index(slot), column)
        load_rows(corrections, row, full, tiles.corrections.index(slot))
        if FORM.GOAL != "ends":
            load_rows(q, token, full, tiles.q.index(slot), column)
        if SQUARES == 2:
            load_rows(scores, row, full, tiles.scores.index(slot))
        if FORM.DECAYED:
            load_rows(chunk_decay, 2 * number, full, tiles.scalings.index(slot * PAIRS + ENDS))
            x = tiles.scalings.index(slot * PAIRS + SCALING.BETA // 2)
            load_rows(scalings, 2 * (number * PAIRS + SCALING.BETA // 2), full, x)
        else:
            for pair in gl.static_range(PAIRS):
                x = tiles.scalings.index(slot * PAIRS + pair)
                load_rows(scalings, 2 * (number * PAIRS + pair), full, x)


@gluon.jit
def store_role(shared, o, FORM: gl.constexpr):
    """One warp: o."""
    tiles, barriers, work = shared
    if FORM.GOAL == "outputs":
        for n in range(work.chunks):
            for part in gl.static_range(FORM.PARTS):
                mbarrier.wait(barriers.written.index(part), n & 1)
                at = [work.token + n * CHUNK, work.column + part * VALUES]
                tma.async_copy_shared_to_global(o, at, tiles.o.index(part))
            for part in gl.static_range(FORM.PARTS):
                tma.store_wait(FORM.PARTS - 1 - part)
                mbarrier.arrive(barriers.stored.index(part))


@gluon.jit
def pair_role(shared, log_scale, FORM: gl.constexpr):
    """Four warps: P of a chunk to its slot."""
    tiles, barriers, work = shared
    LAYOUT: gl.constexpr = product(CHUNK)
    I: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    J: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    for n in range(work.chunks):
        slot = n % FORM.SLOTS
        mbarrier.wait(barriers.full.index(slot), (n // FORM.SLOTS) & 1)
        kq = gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT)
        q, k = tiles.q.index(slot).permute((1, 0)), tiles.k.index(slot)
        kq = warpgroup_mma(k, q, kq, use_acc=False, is_async=True)
        sums = row_of((tiles.scalings, slot), SCALING.WHOLE)
        sum_i, sum_j = sums.load(I)[None, :] + log_scale, sums.load(J)[:, None]
        kq = warpgroup_mma_wait(0, deps=(kq,))
        p = kq * gl.exp2(gl.where(later(CHUNK, 0, 1), sum_i - sum_j, NOTHING))
        tiles.scores.index(slot).permute((1, 0)).store(p.to(k.dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.paired.index(slot))


@gluon.jit
def row_of(scalings, which: gl.constexpr):
    """One scaling of a chunk's rows, [64]."""
    tiles, slot = scalings
    pair = tiles.index(slot * PAIRS + which // 2)
    pair = pair._reinterpret(gl.float32, [2 * CHUNK], PLAIN_1D)
    return pair.slice(which % 2 * CHUNK, CHUNK)


@gluon.jit
def across(scalings, which: gl.constexpr):
    """The same beside the values of its tokens, [1, 64]."""
    return row_of(scalings, which).load(gl.SliceLayout(0, product(CHUNK)))[None, :]


@gluon.jit
def end_of(scalings, FORM: gl.constexpr):
    """The decay of the whole chunk, [1, 1] from the sums up to its last row, or [1, K]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, product(FORM.K))
    if FORM.DECAYED:
        tiles, slot = scalings
        ends = tiles.index(slot * PAIRS + ENDS)._reinterpret(gl.float32, [FORM.K], PLAIN_1D)
        end = ends.load(LAYOUT)
    else:
        whole = row_of(scalings, SCALING.WHOLE).slice(CHUNK - 1, 1).load(LAYOUT)
        rest = row_of(scalings, SCALING.REST).slice(CHUNK - 1, 1).load(LAYOUT)
        end = gl.exp2(whole + rest)
    return end[None, :]


@gluon.jit
def state_role(shared, states, PART: gl.constexpr, FORM: gl.constexpr):
    """64 rows of S, A or D from chunk to chunk, in registers."""
    tiles, barriers, work = shared
    start, end, halves = states
    STATE: gl.constexpr = product(FORM.K)
    o_v, o_k = grid(VALUES, FORM.K, STATE, PART * VALUES)
    o_s = o_v * FORM.K + o_k
    ROWS: gl.constexpr = FORM.PARTS * VALUES * FORM.K
    s = gl.zeros([VALUES, FORM.K], gl.float32, STATE)
    if FORM.GIVEN:
        s = gl.load(start + o_s, mask=o_s < gl.where(work.begins, ROWS, 0), other=0.0)
    s = gl.where(work.transition & (o_v == o_k), 1.0, s)
    if work.transition:
        # A has no values, and nothing is loaded.
        zero = gl.zeros([CHUNK, VALUES], tiles.v.dtype, product(VALUES))
        for slot in gl.static_range(FORM.SLOTS):
            tiles.v.index(slot * FORM.PARTS + PART).store(zero)
        barrier()
    for n in range(work.chunks):
        slot = n % FORM.SLOTS
        own = (
            tiles.q.index(slot), tiles.k.index(slot), tiles.write.index(slot),
            tiles.v.index(slot * FORM.PARTS + PART), tiles.scores.index(slot),
            tiles.corrections.index(slot), (tiles.scalings, slot),
        )  # fmt: skip
        phase = (n // FORM.SLOTS) & 1
        mbarrier.wait(barriers.full.index(slot), phase)
        if FORM.GOAL == "back":
            s = before_chunk(own, s, FORM)
            mbarrier.arrive(barriers.empty.index(slot))
        else:
            paired = barriers.paired.index(slot if FORM.MAKES else 0), phase
            s, o = after_chunk(own, s, paired, FORM)
            mbarrier.arrive(barriers.empty.index(slot))
            if FORM.GOAL == "outputs":
                mbarrier.wait(barriers.stored.index(PART), (n & 1) ^ 1)
                tiles.o.index(PART).permute((1, 0)).store(o.to(tiles.o.dtype))
                fence_async_shared()
                mbarrier.arrive(barriers.written.index(PART))
    if FORM.HALVED and work.transition:
        upper = s.to(tiles.k.dtype)
        gl.store(halves + o_s, upper)
        gl.store(halves + FORM.K * FORM.K + o_s, (s - upper.to(gl.float32)).to(tiles.k.dtype))
    else:
        gl.store(end + o_s, s, mask=o_s < gl.where(work.ends, ROWS, 0))


@gluon.jit
def negative(x):
    """- x, of which the compiler makes no negative products."""
    return gl.inline_asm_elementwise(
        "neg.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def after_chunk(tiles, s, paired, FORM: gl.constexpr):
    """S at the chunk's end, and o."""
    q, k, write, v, scores, corrections, scalings = tiles
    OUTPUT: gl.constexpr = FORM.GOAL == "outputs"
    TOKENS: gl.constexpr = product(CHUNK)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, product(FORM.K), 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    dtype: gl.constexpr = k.dtype
    zero = gl.zeros([VALUES, CHUNK], gl.float32, TOKENS)
    left, o = gl.convert_layout(s.to(dtype), OF_TOKENS), zero
    f = warpgroup_mma(left, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if OUTPUT:
        o = warpgroup_mma(left, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        # Beside whichever products take longer.
        s *= end_of(scalings, FORM)
    v = v.permute((1, 0)).load(TOKENS).to(gl.float32)
    beta = across(scalings, SCALING.BETA)
    if FORM.DECAYED:
        f = v - warpgroup_mma_wait(1 if OUTPUT else 0, deps=(f,))
    else:
        erase = negative(across(scalings, SCALING.ERASE))
        f = warpgroup_mma_wait(1 if OUTPUT else 0, deps=(f,)) * erase + v
    left = gl.convert_layout((f * beta).to(dtype), OF_TOKENS)
    f = warpgroup_mma(left, corrections.permute((1, 0)), f, is_async=True)
    if OUTPUT:
        o = warpgroup_mma_wait(1, deps=(o,))
        if not FORM.DECAYED:
            o *= across(scalings, SCALING.READ)
    else:
        s *= end_of(scalings, FORM)
    w = warpgroup_mma_wait(0, deps=(f,)) * beta
    written = (w if FORM.DECAYED else w * across(scalings, SCALING.WRITE)).to(dtype)
    s = warpgroup_mma(gl.convert_layout(written, OF_STATE), write, s, is_async=True)
    if OUTPUT:
        left = gl.convert_layout(w.to(dtype), OF_TOKENS)
        if FORM.MAKES:
            mbarrier.wait(paired[0], paired[1])
        o = warpgroup_mma(left, scores.permute((1, 0)), o, is_async=True)
        s, o = warpgroup_mma_wait(0, deps=(s, o))
    else:
        s = warpgroup_mma_wait(0, deps=(s,))
    return s, o


@gluon.jit
def before_chunk(tiles, d, FORM: gl.constexpr):
    """D at the chunk's start, of what it is at its end."""
    q, k, write, d_o, scores, corrections, scalings = tiles
    TOKENS: gl.constexpr = product(CHUNK)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, product(FORM.K), 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    dtype: gl.constexpr = k.dtype
    y = gl.zeros([VALUES, CHUNK], gl.float32, TOKENS)
    left = gl.convert_layout(d.to(dtype), OF_TOKENS)
    y = warpgroup_mma(left, write.permute((1, 0)), y, use_acc=False, is_async=True)
    d_o = d_o.permute((1, 0)).load(TOKENS)
    read, beta = d_o, across(scalings, SCALING.BETA)
    if FORM.DECAYED:
        erase = negative(beta)
        y = warpgroup_mma_wait(0, deps=(y,))
    else:
        read = (d_o.to(gl.float32) * across(scalings, SCALING.READ)).to(dtype)
        erase = negative(beta * across(scalings, SCALING.ERASE))
        y = warpgroup_mma_wait(0, deps=(y,)) * across(scalings, SCALING.WRITE)
    y = warpgroup_mma(gl.convert_layout(d_o, OF_TOKENS), scores, y, is_async=True)
    d *= end_of(scalings, FORM)
    y = warpgroup_mma_wait(0, deps=(y,))
    left = gl.convert_layout((y * beta).to(dtype), OF_TOKENS)
    y = warpgroup_mma(left, corrections, y, is_async=True)
    d = warpgroup_mma(gl.convert_layout(read, OF_STATE), q, d, is_async=True)
    x = warpgroup_mma_wait(1, deps=(y,)) * erase
    d = warpgroup_mma(gl.convert_layout(x.to(dtype), OF_STATE), k, d, is_async=True)
    return warpgroup_mma_wait(0, deps=(d,))


@gluon.jit
def new_tiles(dtype: gl.constexpr, FORM: gl.constexpr):
    SQUARE: gl.constexpr = square()
    k = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, FORM.K], SQUARE)
    write = k
    if FORM.DECAYED:
        write = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, FORM.K], SQUARE)
    v = gl.allocate_shared_memory(dtype, [FORM.SLOTS * FORM.PARTS, CHUNK, VALUES], SQUARE)
    corrections = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, CHUNK], SQUARE)
    scalings = gl.allocate_shared_memory(gl.float32, [FORM.SLOTS * PAIRS, 2, CHUNK], straight())
    # What is not there is another thing that nobody touches.
    q, scores, o = k, corrections, v
    if FORM.GOAL != "ends":
        q = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, FORM.K], SQUARE)
        scores = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, CHUNK], SQUARE)
    if FORM.GOAL == "outputs":
        o = gl.allocate_shared_memory(dtype, [FORM.PARTS, CHUNK, VALUES], SQUARE)
    return Tiles(q, k, write, v, scores, corrections, scalings, o)


@gluon.jit(do_not_specialize=["heads", "value_heads", "per_stretch", "T"])
def segment_scan_kernel(
    q, k, write, v, scores, corrections, scalings, chunk_decay, start, o, end, halves, log_scale,
    heads, value_heads, per_stretch, T, FORM: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors up to chunk_decay, and o. With "back" v is dO.

    start [stretches, HV, V, K], or but for "outputs" [N, HV, V, K] of sequences. end is that of
    sequences with "outputs", that of stretches "back", and with "ends" has A [K, K] after each S,
    or in 16 bits, as which halves has the same memory, the upper half of A and the lower.
    """
    FIRST: gl.constexpr = FORM.PLACES == "first"
    if FORM.GOAL == "ends" and FORM.PLACES == "later" and FORM.FOLLOWS:
        # What first segments read was there before these programs, which begin after all else.
        gdc_launch_dependents()
    work, sequence, stretch = work_of(heads, value_heads, per_stretch, T, FORM)
    tiles = new_tiles(k.dtype, FORM)
    barriers = Barriers(
        new_barrier(FORM.SLOTS, 1), new_barrier(FORM.SLOTS, FORM.PARTS), new_barrier(FORM.PARTS, 1),
        new_barrier(FORM.PARTS, 1), new_barrier(FORM.SLOTS if FORM.MAKES else 1, 1),
    )  # fmt: skip
    q, scores, o = present(q, k), present(scores, corrections), present(o, v)
    write, chunk_decay = present(write, k), present(chunk_decay, scalings)
    first, last = (
        (stretch, sequence) if FORM.GOAL == "outputs" and not FIRST else (sequence, stretch)
    )
    at = (last.to(gl.int64) * value_heads * FORM.V + work.column) * FORM.K
    if FORM.GOAL == "ends" or FIRST:
        # Each S and A after it.
        at += (last * value_heads + work.head).to(gl.int64) * (FORM.K * FORM.K)
        at += gl.where(work.transition, FORM.V * FORM.K, 0)
    end += at
    if FORM.HALVED:
        halves += 2 * at
    if FORM.GIVEN:
        start += (first.to(gl.int64) * value_heads * FORM.V + work.column) * FORM.K
    states = present(start, end), end, present(halves, end)
    barrier()
    shared = tiles, barriers, work
    loads = q, k, write, v, scores, corrections, scalings, chunk_decay
    if FORM.PARTS == 2:
        gl.warp_specialize(
            [
                (state_role, (shared, states, 0, FORM)),
                (state_role, (shared, states, 1, FORM)),
                (load_role, (shared, loads, FORM)),
                (store_role, (shared, o, FORM)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    elif FORM.MAKES:
        gl.warp_specialize(
            [
                (state_role, (shared, states, 0, FORM)),
                (pair_role, (shared, log_scale, FORM)),
                (load_role, (shared, loads, FORM)),
                (store_role, (shared, o, FORM)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (state_role, (shared, states, 0, FORM)),
                (load_role, (shared, loads, FORM)),
                (store_role, (shared, o, FORM)),
            ],
            [1, 1],
            [24, 24],
        )
    end_barriers(barriers)
    if FORM.FOLLOWS and FIRST:
        # What follows waits for these programs alone, and those of ends may still run.
        gdc_wait()
