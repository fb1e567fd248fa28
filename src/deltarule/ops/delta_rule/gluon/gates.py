"""The role that makes the scalings of a chunk's rows from its gates, a number for each row.

A row is a write: with n of them a token, it decays before the first. READ and QUERY_SUM are of
tokens. With b_i = sum of log2 decay up to row i of the chunk, g = 2^b, and rq = 1 / |q|,
rk = 1 / |k| with `normalize_qk` (norms.py), else 1:

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

from deltarule.ops.delta_rule.gluon.memory import (
    BETA,
    BLOCK,
    BLOCKS,
    CHUNK,
    COLUMN_SUM,
    END,
    ERASE,
    FACTOR,
    GATES,
    KEY_SUM,
    QUERY_SUM,
    READ,
    SCALING_BETA,
    SCALING_ERASE,
    SCALING_READ,
    SCALING_REST,
    SCALING_WHOLE,
    SCALING_WRITE,
    SCALINGS,
    WRITE,
)

LOG2_E = gl.constexpr(1.4426950408889634)
RESET = gl.constexpr(-127.0)


@gluon.jit
def add(a, b):
    """For sums that run."""
    return a + b


@gluon.jit
def load_gate(gate, row, rows):
    """A gate of 64 rows, in float32, zero after the sequence's end."""
    return gl.load(gate, mask=row < rows, other=0.0).to(gl.float32)


@gluon.jit
def load_decay(log_decay, row, rows, STEPS: gl.constexpr):
    """The log decay of 64 rows alike, zero for all rows of a token but the first."""
    there = row < rows
    if STEPS > 1:
        there = there & (row % STEPS == 0)
    return gl.load(log_decay, mask=there, other=0.0).to(gl.float32)


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
    log_decay, beta, q_norm, k_norm, s_decay, s_beta, s_norm, scale, log_scale = gates
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LAYOUT)
    zero = gl.zeros([CHUNK], gl.float32, LAYOUT)
    STEPS: gl.constexpr = FORM.STEPS
    left = place.tokens * STEPS
    # A chunk's gates are on their way while those of the one before are worked out.
    if DECAY:
        log_decay += (o_t // STEPS).to(gl.int64) * s_decay
        next_decay = load_decay(log_decay, o_t, left, STEPS)
    if TIED:
        beta += o_t.to(gl.int64) * s_beta
        next_beta = load_gate(beta, o_t, left)
    if UNIT:
        q_norm += (o_t // STEPS).to(gl.int64) * s_norm
        k_norm += (o_t // STEPS).to(gl.int64) * s_norm
        if STEPS > 1:
            k_norm += o_t % STEPS
        next_q, next_k = load_gate(q_norm, o_t, left), load_gate(k_norm, o_t, left)
    for i in range(place.chunks):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        gate = slot * GATES
        empty = o_t >= left
        left -= CHUNK
        if DECAY:
            steps = gl.maximum(next_decay * LOG2_E, RESET)
            log_decay += CHUNK // STEPS * s_decay
            next_decay = load_decay(log_decay, o_t, left, STEPS)
            b = gl.associative_scan(steps, 0, add)
            b_end = gl.sum(steps, 0)
        if TIED:
            b_beta = next_beta
            beta += CHUNK * s_beta
            next_beta = load_gate(beta, o_t, left)
        read, key, log_read, log_key = zero + scale, zero + 1.0, zero + log_scale, zero
        if UNIT:
            # Tokens after the end have no norm.
            read, key = scale * next_q, next_k
            log_read += gl.log2(gl.where(empty, 1.0, next_q))
            log_key = gl.log2(gl.where(empty, 1.0, next_k))
            q_norm += CHUNK // STEPS * s_norm
            k_norm += CHUNK // STEPS * s_norm
            next_q, next_k = load_gate(q_norm, o_t, left), load_gate(k_norm, o_t, left)
        mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        write = key
        if TIED:
            if DECAY:
                factor = leave_before(
                    tiles.before.index(slot), steps, b, key, log_key, LAYOUT, True
                )
            else:
                factor = leave_before(tiles.before.index(slot), key, key, key, key, LAYOUT, False)
            tiles.gates.index(gate + FACTOR).store(-factor if SAVE else -b_beta * factor)
        if DECAY:
            store_reads(tiles.gates.index(gate + QUERY_SUM), b + log_read, STEPS)
            tiles.gates.index(gate + KEY_SUM).store(b + log_key)
            tiles.gates.index(gate + COLUMN_SUM).store(b - log_key)
            write = gl.exp2(b_end - b) * key
            decay = gl.exp2(b)
            read, key = read * decay, key * decay
            tiles.gates.index(gate + END).store(gl.exp2(zero + b_end))
        if DECAY or UNIT:
            store_reads(tiles.gates.index(gate + READ), read, STEPS)
            tiles.gates.index(gate + WRITE).store(write)
        if TIED:
            tiles.gates.index(gate + BETA).store(b_beta)
            tiles.gates.index(gate + ERASE).store(key if SAVE else b_beta * key)
        if SAVE:
            own = (place.slot + i * place.value_heads).to(gl.int64)
            if DECAY or TIED or UNIT:
                scaling = saved.scalings + own * (SCALINGS * CHUNK) + o_t
            if DECAY or UNIT:
                gl.store(scaling + SCALING_READ * CHUNK, read)
                gl.store(scaling + SCALING_ERASE * CHUNK, key)
                gl.store(scaling + SCALING_WRITE * CHUNK, write)
            if TIED:
                gl.store(scaling + SCALING_BETA * CHUNK, b_beta)
            if DECAY:
                gl.store(scaling + SCALING_WHOLE * CHUNK, b)
                gl.store(scaling + SCALING_REST * CHUNK, zero)
                gl.store(saved.chunk_decay + own, gl.exp2(b_end))
        mbarrier.arrive(barriers.full.index(slot))


@gluon.jit
def leave_before(before, steps, b, key, log_key, LAYOUT: gl.constexpr, DECAY: gl.constexpr):
    """`before` of every block; what is left of its block's start at a token, times rk."""
    o_t = gl.arange(0, CHUNK, LAYOUT)
    own = key
    for block in gl.static_range(BLOCKS):
        earlier, left = o_t < BLOCK * block, key
        if DECAY:
            start = gl.sum(gl.where(earlier, steps, 0.0), 0)
            own = gl.where(earlier, own, gl.exp2(b - start + log_key))
            left = gl.exp2(start - b + log_key)
        before.slice(block * CHUNK, CHUNK).store(gl.where(earlier, left, 0.0))
    return own
