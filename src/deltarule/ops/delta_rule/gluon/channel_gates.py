"""The roles that bring a chunk's log decays and add them up, and the gates of its tokens.

    c_i = sum of log2 decay up to token i of the chunk

    READ = 1 / |q|        WRITE = 1 / |k|        BETA = beta        ERASE = beta 2^-SHIFT
    FACTOR = - beta

(the first two with `normalize_qk` only). Each role has half of the channels: a lane adds up those
of its own, so that no sum passes from lane to lane. Tokens after the sequence's end decay and erase
nothing. Rows of log decays lie apart by any number of elements, so that they are copied one by one.

A decay of less than 2^-127 is a reset, and counts as 2^-127 (gates.py says why it may).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltarule.ops.delta_rule.gluon.channel_memory import SUM_ROLES, UNSHIFT
from deltarule.ops.delta_rule.gluon.gates import LOG2_E, RESET, add, load_gate
from deltarule.ops.delta_rule.gluon.inverse import PLAIN
from deltarule.ops.delta_rule.gluon.memory import BETA, CHUNK, ERASE, FACTOR, GATES, READ, WRITE

# Rows that are copied, and added up, together: a warp has few registers, and what does not fit in
# them comes back from the L2 cache.
COPIED, ADDED = gl.constexpr(2), gl.constexpr(4)


@gluon.jit
def channel_gate_role(
    shared, gates, PART: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """One warp; all of `gates` that are addresses point at the sequence's first token."""
    tiles, barriers, place, _ = shared
    log_decay, beta, q_norm, k_norm, s_decay, s_beta, s_norm = gates
    CHANNELS: gl.constexpr = K // SUM_ROLES
    log_decay += PART * CHANNELS
    left = place.tokens
    for i in range(place.chunks):
        slot, phase = i % SLOTS, (i // SLOTS) & 1
        if PART == 0:
            chunk = (place.start * 0 + i) * CHUNK
            here = beta + chunk * s_beta, q_norm + chunk * s_norm, k_norm + chunk * s_norm
            leave_gates(tiles, barriers, here, s_beta, s_norm, left, slot, phase, FORM)
        before = i + SLOTS - 1
        mbarrier.wait(barriers.copied.index(before % SLOTS), ((before // SLOTS) & 1) ^ 1)
        load_decays(log_decay, s_decay, left, tiles.decays, PART * CHANNELS, CHANNELS, K)
        if PART != 0:
            mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        leave_sums(tiles, slot, PART * CHANNELS, CHANNELS, K)
        mbarrier.arrive(barriers.decays.index(0))
        log_decay += CHUNK * s_decay
        left -= CHUNK


@gluon.jit
def leave_gates(tiles, barriers, of, s_beta, s_norm, left, slot, phase, FORM: gl.constexpr):
    """The gates of a chunk's tokens, of which so many are `left`, when its slot is free."""
    beta, q_norm, k_norm = of
    gate = slot * GATES
    o_t = gl.arange(0, CHUNK, gl.BlockedLayout([2], [32], [1], [0]))
    if FORM.TIED:
        b_beta = load_gate(beta + o_t.to(gl.int64) * s_beta, o_t, left)
    if FORM.NORMS:
        read = load_gate(q_norm + o_t.to(gl.int64) * s_norm, o_t, left)
        key = load_gate(k_norm + o_t.to(gl.int64) * s_norm, o_t, left)
    mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
    if FORM.TIED:
        tiles.gates.index(gate + BETA).store(b_beta)
        tiles.gates.index(gate + ERASE).store(b_beta * UNSHIFT)
        tiles.gates.index(gate + FACTOR).store(-b_beta)
    if FORM.NORMS:
        tiles.gates.index(gate + READ).store(read)
        tiles.gates.index(gate + WRITE).store(key)
    mbarrier.arrive(barriers.full.index(slot))


@gluon.jit
def load_decays(
    log_decay, s_decay, left, decays, FIRST: gl.constexpr, CHANNELS: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """Log decays of some channels to shared memory, zeros after the sequence's end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    o_r = gl.arange(0, COPIED, gl.SliceLayout(1, LAYOUT))[:, None]
    o_k = gl.arange(0, CHANNELS, gl.SliceLayout(0, LAYOUT))[None, :]
    log_decay += o_r * s_decay + o_k
    parts = decays._reinterpret(gl.float32, [CHUNK // COPIED, COPIED, K], PLAIN)
    for part in range(CHUNK // COPIED):
        async_copy.async_copy_global_to_shared(
            parts.index(part).slice(FIRST, CHANNELS, dim=1), log_decay,
            mask=(o_r < left - part * COPIED) & (o_k < CHANNELS),
        )  # fmt: skip
        log_decay += COPIED * s_decay
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def leave_sums(tiles, slot, FIRST: gl.constexpr, CHANNELS: gl.constexpr, K: gl.constexpr):
    """c in the place of the log decays, and 2^c_end to `ends`, of some channels."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([ADDED, 2], [1, 32], [1, 1], [1, 0])
    parts = tiles.decays._reinterpret(gl.float32, [CHUNK // ADDED, ADDED, K], PLAIN)
    c_end = gl.zeros([CHANNELS], gl.float32, gl.SliceLayout(0, LAYOUT))
    for part in range(CHUNK // ADDED):
        rows = parts.index(part).slice(FIRST, CHANNELS, dim=1)
        steps = gl.maximum(rows.load(LAYOUT) * LOG2_E, RESET)
        rows.store(gl.associative_scan(steps, 0, add) + c_end[None, :])
        c_end += gl.sum(steps, 0)
    tiles.ends.index(slot).slice(FIRST, CHANNELS).store(gl.exp2(c_end))
