"""The delta rule's forward as one kernel of several roles, for Hopper: decay none or per head.

A program has one value head of one sequence. Its roles go through the chunks of 64 tokens side by
side, each as far ahead as the slots of shared memory let it:

    load ----- q k v ---+                 +--- o ----> store
                        v                 |
    gates ---- b ... -> slot -> score --> state roles (64 rows of S each; with an erase also P)
                          ^                 |
                          +---- empty ------+

Each file has a role, with its equations. Everything is read once, and nothing is written but o and
the final state.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltarule.ops.delta_rule.gluon.gates import gate_role
from deltarule.ops.delta_rule.gluon.inverse import PLAIN_1D, PLAIN_3D, barrier
from deltarule.ops.delta_rule.gluon.memory import (
    BLOCKS,
    CHUNK,
    GATES,
    PAIR_SLOTS,
    VALUES,
    Barriers,
    Place,
    Tiles,
    square,
)
from deltarule.ops.delta_rule.gluon.movers import load_role, store_role
from deltarule.ops.delta_rule.gluon.score import score_role
from deltarule.ops.delta_rule.gluon.state import state_role


@gluon.jit
def place_of(cu_seqlens, T, heads, value_heads, PACKED: gl.constexpr):
    """Where this program is: heads follow each other. Offsets out of range are clamped."""
    program = gl.program_id(0)
    value_head, sequence = program % value_heads, program // value_heads
    start, tokens = sequence.to(gl.int64) * T, T
    if PACKED:
        start = gl.minimum(gl.maximum(gl.load(cu_seqlens + sequence).to(gl.int64), 0), T)
        end = gl.minimum(gl.load(cu_seqlens + sequence + 1).to(gl.int64), T)
        tokens = gl.maximum(end - start, 0).to(gl.int32)
    chunks = (tokens + CHUNK - 1) // CHUNK
    return Place(start, tokens, chunks, value_head, value_head // (value_heads // heads)), sequence


@gluon.jit
def new_tiles(
    dtype: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
    TIED: gl.constexpr,
):  # fmt: skip
    """Shared memory for all tiles."""
    SQUARE: gl.constexpr = square()
    q = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, K], SQUARE)
    k = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, K], SQUARE)
    v = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, CHUNK, VALUES], SQUARE)
    o = gl.allocate_shared_memory(dtype, [PARTS, CHUNK, VALUES], SQUARE)
    p = gl.allocate_shared_memory(dtype, [PAIR_SLOTS if TIED else SLOTS, CHUNK, CHUNK], SQUARE)
    gates = gl.allocate_shared_memory(gl.float32, [SLOTS * GATES, CHUNK], PLAIN_1D)
    # Before Triton 3.7 a tuple has no None: what is not there is another thing that nobody reads.
    t, before, rows, blocks, scaled, identity = p, p, p, p, p, p
    if TIED:
        t = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, CHUNK], SQUARE)
        rows = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], SQUARE)
        blocks = gl.allocate_shared_memory(gl.float16, [4, 16, 16], PLAIN_3D)
        scaled = gl.allocate_shared_memory(gl.float16, [4, 16, 16], PLAIN_3D)
        before = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCKS * CHUNK], PLAIN_1D)
        identity = gl.allocate_shared_memory(gl.float32, [4, 16, 16], PLAIN_3D)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 4, 8], [4, 1, 1], [2, 1, 0])
        ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
        COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
        row = gl.arange(0, 16, ROW)[None, :, None]
        column = gl.arange(0, 16, COLUMN)[None, None, :]
        one = gl.where(row == column, 1.0, 0.0)
        zero = gl.zeros([4, 16, 16], gl.float32, LAYOUT)
        identity.store(one + zero)
    return Tiles(q, k, v, t, p, o, gates, before, rows, blocks, scaled, identity)


@gluon.jit
def new_barrier(number: gl.constexpr, count: gl.constexpr):
    """Barriers that wait for so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def new_barriers(PARTS: gl.constexpr, SLOTS: gl.constexpr, TIED: gl.constexpr):
    """All barriers: a slot is full with its tiles and its gates."""
    full, empty = new_barrier(SLOTS, 2), new_barrier(SLOTS, PARTS)
    scored = new_barrier(SLOTS, 1)
    paired = new_barrier(PAIR_SLOTS, PARTS) if TIED else scored
    written, stored = new_barrier(PARTS, 1), new_barrier(PARTS, 1)
    return Barriers(full, empty, scored, paired, written, stored)


GENERAL = ["T", "s_decay_b", "s_decay_t", "s_decay_h", "s_beta_b", "s_beta_t", "s_beta_h"]


@gluon.jit(do_not_specialize=GENERAL)
def forward_kernel(
    q, k, v, o, q_rows, k_rows, v_rows, o_rows, log_decay, beta, norms, cu_seqlens, initial_state,
    final_state, scale, log_scale, T, heads, value_heads, s_decay_b, s_decay_t, s_decay_h,
    s_beta_b, s_beta_t, s_beta_h, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr,
    DECAY: gl.constexpr, TIED: gl.constexpr, UNIT: gl.constexpr, PACKED: gl.constexpr,
    RAGGED: gl.constexpr, STATE_REGISTERS: gl.constexpr, SCORE_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, k, v and o twice: as descriptors of tiles, and as addresses of rows.

    States are [N, HV, V, K]. The first state role has the registers that the others leave.
    """
    PARTS: gl.constexpr = V // VALUES
    dtype: gl.constexpr = q.dtype
    place, sequence = place_of(cu_seqlens, T, heads, value_heads, PACKED)
    tiles = new_tiles(dtype, K, PARTS, SLOTS, TIED)
    barriers = new_barriers(PARTS, SLOTS, TIED)
    state = (sequence * value_heads + place.value_head).to(gl.int64) * (V * K)
    final_state += state
    INITIAL: gl.constexpr = initial_state is not None
    if INITIAL:
        initial_state += state
    else:
        initial_state = final_state
    # Packed sequences share one row of the batch.
    row, token = sequence, place.start * 0
    if PACKED:
        row, token = sequence * 0, place.start
    if DECAY:
        log_decay += row.to(gl.int64) * s_decay_b + token * s_decay_t + place.value_head * s_decay_h
    else:
        log_decay = final_state
    if TIED:
        beta += row.to(gl.int64) * s_beta_b + token * s_beta_t + place.value_head * s_beta_h
    else:
        beta = final_state
    q_norm, k_norm = final_state, final_state
    if UNIT:
        q_norm = norms + ((row.to(gl.int64) * T + token) * heads + place.key_head) * 2
        k_norm = q_norm + 1
    barrier()
    own = tiles, barriers, place
    loads = q, k, v, q_rows, k_rows, v_rows
    gates = (
        log_decay, beta, q_norm, k_norm, s_decay_t, s_beta_t, heads * 2, scale, log_scale,
    )  # fmt: skip
    states = initial_state, final_state, scale
    if PARTS == 2:
        gl.warp_specialize(
            [
                (state_role, (own, states, INITIAL, 0, PARTS, K, SLOTS, DECAY, TIED, UNIT)),
                (state_role, (own, states, INITIAL, 1, PARTS, K, SLOTS, DECAY, TIED, UNIT)),
                (score_role, (own, scale, SLOTS, DECAY, TIED, UNIT)),
                (load_role, (own, loads, heads, value_heads, K, PARTS, SLOTS, RAGGED)),
                (store_role, (own, o, o_rows, value_heads, PARTS, RAGGED)),
                (gate_role, (own, gates, SLOTS, DECAY, TIED, UNIT)),
            ],
            [4, 4, 1, 1, 1],
            [STATE_REGISTERS, SCORE_REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (state_role, (own, states, INITIAL, 0, PARTS, K, SLOTS, DECAY, TIED, UNIT)),
                (score_role, (own, scale, SLOTS, DECAY, TIED, UNIT)),
                (load_role, (own, loads, heads, value_heads, K, PARTS, SLOTS, RAGGED)),
                (store_role, (own, o, o_rows, value_heads, PARTS, RAGGED)),
                (gate_role, (own, gates, SLOTS, DECAY, TIED, UNIT)),
            ],
            [4, 1, 1, 1],
            [SCORE_REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
