"""The roles that add up a chunk's log decays, and bring the gates of its tokens.

    c_i = sum of log2 decay up to token i of the chunk

    READ = 1 / |q|        WRITE = 1 / |k|        BETA = beta        ERASE = beta 2^-SHIFT
    FACTOR = - beta, with SAVE - 1

(the first two with `normalize_qk` only). Each role has half of the channels: a lane adds up those
of its own, so that no sum passes from lane to lane. Tokens after the sequence's end decay and erase
nothing: the copy engine, which brings the log decays, has zeros there.

A decay of less than 2^-127 is a reset, and counts as 2^-127 (gates.py says why it may).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deltarule.ops.delta_rule.gluon.channel_memory import SUM_ROLES, UNSHIFT, decays_of
from deltarule.ops.delta_rule.gluon.gates import LOG2_E, RESET, load_gate
from deltarule.ops.delta_rule.gluon.inverse import PLAIN, four, joined
from deltarule.ops.delta_rule.gluon.memory import CHUNK, GATE, GATES
from deltarule.ops.delta_rule.triton.tiles import SCALING, SCALINGS

# Rows that are added up together: a warp has few registers, and what does not fit in them comes
# back from the L2 cache.
ADDED = gl.constexpr(4)

# Asks for a number's neighbours too, some 64 bytes; nobody waits for it.
FETCH, FETCHED = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;"), gl.constexpr(16)


@gluon.jit
def channel_gate_role(shared, gates, PART: gl.constexpr, FORM: gl.constexpr):
    """One warp; all of `gates` that are addresses point at the sequence's first token."""
    tiles, barriers, place, saved = shared
    log_decay, beta, q_norm, k_norm, s_decay, s_beta, s_norm = gates
    CHANNELS: gl.constexpr = FORM.K // SUM_ROLES
    DECAY_SLOTS: gl.constexpr = tiles.decays.shape[0]
    log_decay += PART * CHANNELS
    left = place.tokens
    for i in range(place.chunks):
        slot, phase = i % FORM.SLOTS, (i // FORM.SLOTS) & 1
        log_decay += CHUNK * s_decay
        # Without an erase there are two slots of decays, and asking ahead only costs.
        if FORM.TIED:
            prefetch(log_decay, s_decay, left - CHUNK, CHANNELS)
        if PART == 0:
            chunk = (place.start * 0 + i) * CHUNK
            here = beta + chunk * s_beta, q_norm + chunk * s_norm, k_norm + chunk * s_norm
            leave_gates(shared, here, s_beta, s_norm, left, i, slot, phase, FORM)
        mbarrier.wait(barriers.fetched.index(i % DECAY_SLOTS), (i // DECAY_SLOTS) & 1)
        c = leave_sums(decays_of(tiles, i), PART * CHANNELS, CHANNELS)
        # The copy engine will write here again.
        fence_async_shared()
        if PART != 0:
            mbarrier.wait(barriers.empty.index(slot), phase ^ 1)
        end = gl.exp2(c)
        tiles.ends.index(slot).slice(PART * CHANNELS, CHANNELS).store(end)
        if FORM.SAVE:
            own = (place.slot + i * place.value_heads).to(gl.int64) * FORM.K + PART * CHANNELS
            gl.store(saved.chunk_decay + own + gl.arange(0, CHANNELS, end.type.layout), end)
        mbarrier.arrive(barriers.decays.index(i % DECAY_SLOTS))
        left -= CHUNK


@gluon.jit
def prefetch(log_decay, s_decay, left, CHANNELS: gl.constexpr):
    """The next chunk's log decays to the L2 cache; of tokens after the end, the last one's."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 1], [1, 0])
    row = gl.minimum(gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT)), left - 1)[:, None]
    o_k = gl.arange(0, CHANNELS // FETCHED, gl.SliceLayout(0, LAYOUT))[None, :] * FETCHED
    gl.inline_asm_elementwise(
        FETCH, "=r,l", [log_decay + (row * s_decay + o_k)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def leave_gates(shared, of, s_beta, s_norm, left, i, slot, phase, FORM: gl.constexpr):
    """The gates of a chunk's tokens, of which so many are `left`, when its slot is free."""
    tiles, barriers, place, saved = shared
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
        tiles.gates.index(gate + GATE.BETA).store(b_beta)
        if FORM.SAVE:
            tiles.gates.index(gate + GATE.FACTOR).store(b_beta * 0.0 - 1.0)
            own = (place.slot + i * place.value_heads).to(gl.int64) * SCALINGS + SCALING.BETA
            gl.store(saved.scalings + own * CHUNK + o_t, b_beta)
        else:
            tiles.gates.index(gate + GATE.ERASE).store(b_beta * UNSHIFT)
            tiles.gates.index(gate + GATE.FACTOR).store(-b_beta)
    if FORM.NORMS:
        tiles.gates.index(gate + GATE.READ).store(read)
        tiles.gates.index(gate + GATE.WRITE).store(key)
    mbarrier.arrive(barriers.full.index(slot))


@gluon.jit
def leave_sums(decays, FIRST: gl.constexpr, CHANNELS: gl.constexpr):
    """c in the place of the log decays of some channels; that of the last token."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([ADDED, 2], [1, 32], [1, 1], [1, 0])
    rows = decays._reinterpret(gl.float32, [CHUNK // ADDED, ADDED, decays.shape[1]], PLAIN)
    c = gl.zeros([CHANNELS], gl.float32, gl.SliceLayout(0, LAYOUT))
    for part in range(CHUNK // ADDED):
        tile = rows.index(part).slice(FIRST, CHANNELS, dim=1)
        steps = gl.maximum(tile.load(LAYOUT) * LOG2_E, RESET)
        x = four(gl.permute(gl.reshape(steps, [2, 2, CHANNELS]), (2, 0, 1)))
        c_0 = gl.convert_layout(c, x[0].type.layout) + x[0]
        c_1 = c_0 + x[1]
        c_2 = c_1 + x[2]
        c_3 = c_2 + x[3]
        sums = gl.permute(joined((c_0, c_1, c_2, c_3)), (1, 2, 0))
        tile.store(gl.convert_layout(gl.reshape(sums, [ADDED, CHANNELS]), LAYOUT))
        c = gl.convert_layout(c_3, gl.SliceLayout(0, LAYOUT))
    return c
