"""The role that makes the scalings of a chunk's rows from its gates, a number for each row.

A row is a write: with n of them a token, it decays before the first. READ and QUERY_SUM are of
tokens. With b_i = sum of log2 decay up to row i of the chunk, g = 2^b, and rq = 1 / |q|,
rk = 1 / |k| with `normalize_qk` (stage.py), else 1:

    READ = scale g rq      BETA = beta      ERASE = beta g rk      WRITE = 2^(b_end - b) rk
    END = 2^b_end          QUERY_SUM = b + log2(scale rq)          KEY_SUM = b + log2 rk
                           COLUMN_SUM = b - log2 rk

and for the score role, of the blocks of 16 tokens, with a the sum b before a block's first token,

    FACTOR_i = - beta 2^(b_i - a) rk_i          of the token's own block
    before_j = 2^(a - b_j) rk_j                 for tokens j before the block, and 0 for the others

(ERASE and FACTOR without beta where N is made: inverse.py). With SAVE some of it is left in global
memory, too.

A decay of less than 2^-127 is a reset, and counts as 2^-127: of anything across it the power of two
is zero, and what the large sums cost the weaker decays after it in digits, 2^-11 at most, shows
beside the rounding of no 16-bit type. Tokens after the sequence's end decay and erase nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltarule.ops.delta_rule.gluon.memory import BLOCK, BLOCKS, CHUNK, GATE, GATES
from deltarule.ops.delta_rule.triton.tiles import SCALING, SCALINGS

LOG2_E = gl.constexpr(1.4426950408889634)
RESET = gl.constexpr(-127.0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def fast_log2(x):
    """log2 of positive numbers, in one instruction, to 2^-22."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def load_gate(gate, row, rows):
    """A gate of 64 rows, in float32, zero after the sequence's end."""
    return gl.load(gate, mask=row < rows, other=0.0).to(gl.float32)


@gluon.jit
def load_decay(log_decay, row, stride, rows, STEPS: gl.constexpr):
    """The log decay of 64 rows of tokens alike, zero for all of a token but the first."""
    there = row < rows
    if STEPS > 1:
        there = there & (row % STEPS == 0)
    at = log_decay + (row // STEPS).to(gl.int64) * stride
    return gl.load(at, mask=there, other=0.0).to(gl.float32)


@gluon.jit
def load_norm(norm, row, stride, rows, STEPS: gl.constexpr):
    """A number of the tokens of 64 rows, 1 after the sequence's end: it has a logarithm."""
    at = norm + (row // STEPS).to(gl.int64) * stride
    return gl.load(at, mask=row < rows, other=1.0)


@gluon.jit
def store_reads(gate, x, STEPS: gl.constexpr):
    """A number for each token, of those for each row."""
    if STEPS == 2:
        x, _ = gl.split(gl.reshape(x, [CHUNK // 2, 2]))
        gate.slice(0, CHUNK // 2).store(x)
    else:
        gate.store(x)


@gluon.jit
def gate_role(
    shared, gates, SLOTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """One warp; log_decay, beta and the norms of q and k point at the sequence's first token."""
    tiles, barriers, place, saved = shared
    DECAY: gl.constexpr = FORM.DECAY
    TIED: gl.constexpr = FORM.TIED
    UNIT: gl.constexpr = FORM.UNIT
    SAVE: gl.constexpr = FORM.SAVE
    log_decay, beta, norm, s_decay, s_beta, s_norm, scale, log_scale = gates
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LAYOUT)
    zero = gl.zeros([CHUNK], gl.float32, LAYOUT)
    STEPS: gl.constexpr = FORM.STEPS
    left = place.tokens * STEPS
    for i in range(place.chunks):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        gate = slot * GATES
        # All that takes long, before there is room.
        if TIED:
            b_beta = load_gate(beta + o_t.to(gl.int64) * s_beta, o_t, left)
            beta += CHUNK * s_beta
        if UNIT:
            b_q = load_norm(norm, o_t, s_norm, left, STEPS)
            b_k = load_norm(norm + (1 + o_t % STEPS), o_t, s_norm, left, STEPS)
            norm += CHUNK // STEPS * s_norm
        if DECAY:
            steps = load_decay(log_decay, o_t, s_decay, left, STEPS)
            log_decay += CHUNK // STEPS * s_decay
            # One lane's sum is wanted by all, and a sum over lanes takes longer than to read it.
            tiles.sums.store(gl.associative_scan(gl.maximum(steps * LOG2_E, RESET), 0, add))
        mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        if DECAY:
            b, b_end = tiles.sums.load(LAYOUT), tiles.sums.slice(CHUNK - 1, 1).load(LAYOUT)
        # One after the other, because a warp has few registers: what keys want, and then queries.
        key = zero + 1.0
        if UNIT:
            key = b_k
        write, erase = key, key
        if DECAY:
            b_key, b_column = b, b
            if UNIT:
                log_key = fast_log2(key)
                b_key, b_column = b + log_key, b - log_key
            tiles.gates.index(gate + GATE.KEY_SUM).store(b_key)
            tiles.gates.index(gate + GATE.COLUMN_SUM).store(b_column)
            tiles.gates.index(gate + GATE.END).store(gl.exp2(zero + b_end))
        if TIED:
            before, factor = tiles.before.index(slot), key
            if DECAY:
                factor = leave_decays_before(before, tiles.sums, b_key, b_column, LAYOUT)
            else:
                leave_keys_before(before, key, LAYOUT)
            tiles.gates.index(gate + GATE.FACTOR).store(-factor if SAVE else -b_beta * factor)
        if DECAY:
            write, erase = gl.exp2(b_end - b) * key, gl.exp2(b) * key
        if TIED:
            tiles.gates.index(gate + GATE.BETA).store(b_beta)
            tiles.gates.index(gate + GATE.ERASE).store(erase if SAVE else b_beta * erase)
        if DECAY or UNIT:
            tiles.gates.index(gate + GATE.WRITE).store(write)
            read = zero + scale
            if UNIT:
                read *= b_q
            if DECAY:
                b_query = b + log_scale
                if UNIT:
                    b_query += fast_log2(b_q)
                store_reads(tiles.gates.index(gate + GATE.QUERY_SUM), b_query, STEPS)
                read *= gl.exp2(b)
            store_reads(tiles.gates.index(gate + GATE.READ), read, STEPS)
        if SAVE:
            own = ((place.slot + i * place.value_heads) // FORM.PER_GATE).to(gl.int64)
            if DECAY or TIED or UNIT:
                scaling = saved.scalings + own * (SCALINGS * CHUNK) + o_t
            if DECAY or UNIT:
                gl.store(scaling + SCALING.READ * CHUNK, read)
                gl.store(scaling + SCALING.ERASE * CHUNK, erase)
                gl.store(scaling + SCALING.WRITE * CHUNK, write)
            if TIED:
                gl.store(scaling + SCALING.BETA * CHUNK, b_beta)
            if DECAY:
                gl.store(scaling + SCALING.WHOLE * CHUNK, b)
                gl.store(scaling + SCALING.REST * CHUNK, zero)
                gl.store(saved.chunk_decay + own + gl.arange(0, 1, LAYOUT), gl.exp2(b_end))
        mbarrier.arrive(barriers.full.index(slot))
        left -= CHUNK


@gluon.jit
def leave_decays_before(before, sums, b_key, b_column, LAYOUT: gl.constexpr):
    """`before` of every block; what is left of its block's start at a token, times rk."""
    o_t = gl.arange(0, CHUNK, LAYOUT)
    a = gl.zeros([CHUNK], gl.float32, LAYOUT)
    before.slice(0, CHUNK).store(a)
    for block in gl.static_range(1, BLOCKS):
        start, earlier = sums.slice(BLOCK * block - 1, 1).load(LAYOUT), o_t < BLOCK * block
        left = gl.where(earlier, gl.exp2(start - b_column), 0.0)
        before.slice(block * CHUNK, CHUNK).store(left)
        a = gl.where(earlier, a, start)
    return gl.exp2(b_key - a)


@gluon.jit
def leave_keys_before(before, key, LAYOUT: gl.constexpr):
    """The same of a chunk without decays."""
    o_t = gl.arange(0, CHUNK, LAYOUT)
    for block in gl.static_range(BLOCKS):
        before.slice(block * CHUNK, CHUNK).store(gl.where(o_t < BLOCK * block, key, 0.0))
