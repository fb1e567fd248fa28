"""The role that brings a chunk's log decays, of tokens and channels, and the gates of its tokens.

    READ = 1 / |q|        WRITE = 1 / |k|        BETA = beta        ERASE = beta 2^-SHIFT
    FACTOR = - beta

(the first two with `normalize_qk` only). Tokens after the sequence's end decay and erase nothing.
Rows of log decays lie apart by any number of elements, so that they are copied one by one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltarule.ops.delta_rule.gluon.channel_memory import UNSHIFT
from deltarule.ops.delta_rule.gluon.gates import load_gate
from deltarule.ops.delta_rule.gluon.inverse import PLAIN
from deltarule.ops.delta_rule.gluon.memory import BETA, CHUNK, ERASE, FACTOR, GATES, READ, WRITE

# Rows that are copied together: a warp has few registers.
ROWS = gl.constexpr(8)


@gluon.jit
def channel_gate_role(
    shared, gates, K: gl.constexpr, SLOTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """One warp; all of `gates` that are addresses point at the sequence's first token."""
    tiles, barriers, place, _ = shared
    log_decay, beta, q_norm, k_norm, s_decay, s_beta, s_norm = gates
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LAYOUT)
    left = place.tokens
    for i in range(place.chunks):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        gate = slot * GATES
        if FORM.TIED:
            b_beta = load_gate(beta + o_t.to(gl.int64) * s_beta, o_t, left)
            beta += CHUNK * s_beta
        if FORM.NORMS:
            read = load_gate(q_norm + o_t.to(gl.int64) * s_norm, o_t, left)
            key = load_gate(k_norm + o_t.to(gl.int64) * s_norm, o_t, left)
            q_norm += CHUNK * s_norm
            k_norm += CHUNK * s_norm
        mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        if FORM.TIED:
            tiles.gates.index(gate + BETA).store(b_beta)
            tiles.gates.index(gate + ERASE).store(b_beta * UNSHIFT)
            tiles.gates.index(gate + FACTOR).store(-b_beta)
        if FORM.NORMS:
            tiles.gates.index(gate + READ).store(read)
            tiles.gates.index(gate + WRITE).store(key)
        mbarrier.arrive(barriers.full.index(slot))
        before = i + SLOTS - 1
        mbarrier.wait(barriers.copied.index(before % SLOTS), ((before // SLOTS) & 1) ^ 1)
        load_decays(log_decay, s_decay, left, tiles.decays, K)
        mbarrier.arrive(barriers.decays.index(0))
        log_decay += CHUNK * s_decay
        left -= CHUNK


@gluon.jit
def load_decays(log_decay, s_decay, left, decays, K: gl.constexpr):
    """Log decays of a chunk's tokens to shared memory, zeros after the sequence's end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    parts = decays._reinterpret(gl.float32, [CHUNK // ROWS, ROWS, K], PLAIN)
    for part in range(CHUNK // ROWS):
        async_copy.async_copy_global_to_shared(
            parts.index(part), log_decay + (o_r * s_decay + o_k),
            mask=(o_r < left - part * ROWS) & (o_k < K),
        )  # fmt: skip
        log_decay += ROWS * s_decay
    async_copy.commit_group()
    async_copy.wait_group(0)
