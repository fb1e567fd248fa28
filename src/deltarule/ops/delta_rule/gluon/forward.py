"""The delta rule's forward as one kernel of several roles, for Hopper: two kernels, by decay.

    forward_kernel            decays none or per head
    channel_forward_kernel    a decay per channel

A program has one value head of one sequence. Its roles go through the chunks of 64 tokens side by
side, each as far ahead as the slots of shared memory let it:

    load ----- q k v ---+                 +--- o ----> store
                        v                 |
    gates ---- b ... -> slot -> score --> state roles (64 rows of S each; with an erase also P)
                          ^                 |
                          +---- empty ------+

and with a decay per channel, with roles of scores, states and gates of their own,

    load ----- q k v ---+                                        +--- o ----> store
                        v                                        |
    gates ---- b ... -> slot -> score ------ may go on --> state roles
    gates ------ sums --------> score <-- q, k scaled ---> state roles <-- P --> each other
                        ^       score -------- U --------> state roles
                        |                                        |
                        +---------------- empty -----------------+

Norms of q and k come from a kernel before (stage.py). Each file has a role, with its equations.
Everything is read once, and nothing is written but o and the final state.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.channel_gates import channel_gate_role
from deltarule.ops.delta_rule.gluon.channel_memory import (
    ChannelSaved,
    new_channel_barriers,
    new_channel_tiles,
)
from deltarule.ops.delta_rule.gluon.channel_score import channel_score_role
from deltarule.ops.delta_rule.gluon.channel_state import channel_state_role
from deltarule.ops.delta_rule.gluon.gates import gate_role
from deltarule.ops.delta_rule.gluon.inverse import PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import (
    BLOCKS,
    CHUNK,
    GATES,
    PAIR_SLOTS,
    VALUES,
    Barriers,
    Place,
    Saved,
    Tiles,
    packed_bounds,
)
from deltarule.ops.delta_rule.gluon.movers import load_role, store_role
from deltarule.ops.delta_rule.gluon.products import score_places, state_places
from deltarule.ops.delta_rule.gluon.score import score_role
from deltarule.ops.delta_rule.gluon.state import state_role
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, new_barrier, present, square


@gluon.jit
def place_of(cu_seqlens, T, heads, value_heads, FORM: gl.constexpr):
    """Where this program is: heads follow each other. Offsets out of range are clamped."""
    PACKED: gl.constexpr = FORM.ENDS == "packed"
    QUERIES: gl.constexpr = CHUNK // FORM.STEPS
    program = gl.program_id(0)
    value_head, sequence = program % value_heads, program // value_heads
    start, tokens = sequence.to(gl.int64) * T, T
    if PACKED:
        start, tokens = packed_bounds(cu_seqlens, sequence, T)
    chunks = (tokens + QUERIES - 1) // QUERIES
    key_head, number = value_head // (value_heads // heads), sequence * chunks
    if PACKED:
        number = (start // QUERIES).to(gl.int32) + sequence
    slot = number * value_heads + value_head
    return Place(start, tokens, chunks, value_head, key_head, value_heads, slot), sequence


@gluon.jit
def own_states(initial_state, final_state, place, sequence, FORM: gl.constexpr):
    """Those of this program; for an initial state that is not there the other, which nobody
    reads."""
    state = sequence * place.value_heads + place.value_head
    state = state.to(gl.int64) * (FORM.WIDTH * FORM.KEYS)
    final_state += state
    if FORM.INITIAL:
        initial_state += state
    return present(initial_state, final_state), final_state


@gluon.jit
def first_gate(gates, other, place, sequence, strides, STEPS: gl.constexpr, FORM: gl.constexpr):
    """A sequence's first gate, of STEPS a token; of gates that are not there the other, which
    nobody reads."""
    row, token = sequence, place.start * 0
    if FORM.ENDS == "packed":
        # Packed sequences share one row of the batch.
        row, token = sequence * 0, place.start
    if gates is None:
        found = other
    else:
        s_batch, s_token, s_head = strides
        head = place.value_head // FORM.PER_GATE
        found = gates + (row.to(gl.int64) * s_batch + token * STEPS * s_token + head * s_head)
    return found


@gluon.jit
def new_tiles(dtype: gl.constexpr, FORM: gl.constexpr):
    """Shared memory for all tiles; those of values where there are state roles (PARTS)."""
    SQUARE: gl.constexpr = square()
    SCORES: gl.constexpr = FORM.SCORES or FORM.PARTS > 0
    QUERIES: gl.constexpr = CHUNK // FORM.STEPS
    k = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, FORM.K], SQUARE)
    q = k
    if SCORES:
        q = gl.allocate_shared_memory(dtype, [FORM.SLOTS, QUERIES, FORM.K], SQUARE)
    v, o = q, q
    if FORM.PARTS > 0:
        v = gl.allocate_shared_memory(dtype, [FORM.SLOTS * FORM.PARTS, CHUNK, VALUES], SQUARE)
        o = gl.allocate_shared_memory(dtype, [FORM.PARTS, QUERIES, VALUES], SQUARE)
    PAIRS: gl.constexpr = PAIR_SLOTS if FORM.TIED and FORM.PARTS > 0 else FORM.SLOTS
    p = q
    if SCORES:
        p = gl.allocate_shared_memory(dtype, [PAIRS, QUERIES, CHUNK], SQUARE)
    # Without state roles the gates of a chunk take as long as its scores, and are made before.
    GATE_SLOTS: gl.constexpr = FORM.SLOTS if FORM.PARTS > 0 else 2 * FORM.SLOTS
    gates = gl.allocate_shared_memory(gl.float32, [GATE_SLOTS * GATES, CHUNK], PLAIN_1D)
    sums = gl.allocate_shared_memory(gl.float32, [CHUNK], PLAIN_1D)
    # Before Triton 3.7 a tuple has no None: what is not there is another thing that nobody reads.
    u, before, rows = p, p, p
    saved, errors = o, o
    if FORM.SAVE and FORM.PARTS > 0:
        saved = gl.allocate_shared_memory(dtype, [FORM.PARTS, VALUES, FORM.K], SQUARE)
        if FORM.TIED:
            errors = gl.allocate_shared_memory(dtype, [FORM.PARTS, CHUNK, VALUES], SQUARE)
    if FORM.TIED:
        u = gl.allocate_shared_memory(dtype, [FORM.SLOTS, CHUNK, CHUNK], SQUARE)
        rows = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], SQUARE)
        before = gl.allocate_shared_memory(gl.float32, [GATE_SLOTS, BLOCKS * CHUNK], PLAIN_1D)
    return Tiles(q, k, v, u, p, o, saved, errors, gates, sums, before, rows)


@gluon.jit
def new_barriers(PARTS: gl.constexpr, SLOTS: gl.constexpr):
    full, empty = new_barrier(SLOTS, 2), new_barrier(SLOTS, PARTS)
    scored = new_barrier(SLOTS, 1)
    paired = new_barrier(PAIR_SLOTS, PARTS)
    written, stored = new_barrier(PARTS, 1), new_barrier(PARTS, 1)
    return Barriers(full, empty, scored, paired, written, stored)


GENERAL = ["T", "s_decay_b", "s_decay_t", "s_decay_h", "s_beta_b", "s_beta_t", "s_beta_h"]


@gluon.jit(do_not_specialize=GENERAL)
def forward_kernel(
    q, k, v, o, states, lower_states, errors, scores, corrections,
    scalings, chunk_decay, log_decay, beta, norms, cu_seqlens, initial_state, final_state, scale,
    log_scale, T, heads, value_heads, s_decay_b, s_decay_t, s_decay_h, s_beta_b, s_beta_t, s_beta_h,
    FORM: gl.constexpr, STATE_REGISTERS: gl.constexpr, SCORE_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, k, v and o are descriptors of tiles.

    SAVE: states up to corrections (descriptors), scalings and chunk_decay are left, too,
    those of them that this form of the call has; the scan back may take the scores itself. States
    are [N, HV, WIDTH, KEYS]. The first state role has the registers that the others leave.
    """
    LATE: gl.constexpr = FORM.TIED or FORM.SAVE
    place, sequence = place_of(cu_seqlens, T, heads, value_heads, FORM)
    tiles, barriers = new_tiles(q.dtype, FORM), new_barriers(FORM.PARTS, FORM.SLOTS)
    places = state_places(q.dtype, FORM)
    other = places
    if FORM.PARTS == 2:
        other = state_places(q.dtype, FORM)
    of_scores = score_places(FORM)
    initial_state, final_state = own_states(initial_state, final_state, place, sequence, FORM)
    strides = s_decay_b, s_decay_t, s_decay_h
    log_decay = first_gate(log_decay, final_state, place, sequence, strides, 1, FORM)
    strides = s_beta_b, s_beta_t, s_beta_h
    beta = first_gate(beta, final_state, place, sequence, strides, FORM.STEPS, FORM)
    norm = final_state
    if FORM.UNIT:
        norm = norms + (place.start * heads + place.key_head) * (1 + FORM.STEPS)
    barrier()
    saved = final_state
    if FORM.SAVE:
        saved = Saved(
            states, present(lower_states, states), present(errors, states), present(scores, states),
            present(corrections, states), present(scalings, saved), present(chunk_decay, saved),
        )  # fmt: skip
    own = tiles, barriers, place, saved
    gates = log_decay, beta, norm, s_decay_t, s_beta_t, heads * (1 + FORM.STEPS), scale, log_scale
    states = initial_state, final_state, scale
    if FORM.PARTS == 2:
        gl.warp_specialize(
            [
                (state_role, (own, states, places, 0, FORM.PARTS, FORM.K, FORM.SLOTS, FORM)),
                (state_role, (own, states, other, 1, FORM.PARTS, FORM.K, FORM.SLOTS, FORM)),
                (score_role, (own, scale, of_scores, FORM.SLOTS, FORM)),
                (load_role, (own, (q, k, v), FORM)),
                (store_role, (own, o, LATE, FORM)),
                (gate_role, (own, gates, FORM.SLOTS, FORM)),
            ],
            [4, 4, 1, 1, 1],
            [STATE_REGISTERS, SCORE_REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (state_role, (own, states, places, 0, FORM.PARTS, FORM.K, FORM.SLOTS, FORM)),
                (score_role, (own, scale, of_scores, FORM.SLOTS, FORM)),
                (load_role, (own, (q, k, v), FORM)),
                (store_role, (own, o, LATE, FORM)),
                (gate_role, (own, gates, FORM.SLOTS, FORM)),
            ],
            [4, 1, 1, 1],
            [SCORE_REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    end_barriers(barriers)


@gluon.jit(do_not_specialize=GENERAL)
def channel_forward_kernel(
    q, k, v, o, decays, errors, scores, corrections, q_rows, k_rows, states, decayed_q,
    erase, write, scalings, chunk_decay, fast_rows, log_decay, beta, norms, cu_seqlens,
    initial_state, final_state, scale, T, heads, value_heads, s_beta_b, s_beta_t, s_beta_h,
    FORM: gl.constexpr, STATE_REGISTERS: gl.constexpr, SCORE_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, k and log_decay twice: as descriptors of tiles, and as addresses of rows.

    log_decay (`decays`) [B, T, HV, K] lies in one piece, in float32. States are [N, HV, V, K]. With
    SAVE what lies between is left for a backward, as far as this form of the call has it. The first
    state role has the registers that the others leave.
    """
    place, sequence = place_of(cu_seqlens, T, heads, value_heads, FORM)
    tiles = new_channel_tiles(q.dtype, FORM)
    barriers = new_channel_barriers(FORM)
    initial_state, final_state = own_states(initial_state, final_state, place, sequence, FORM)
    log_decay += (place.start * value_heads + place.value_head) * FORM.K
    strides = s_beta_b, s_beta_t, s_beta_h
    beta = first_gate(beta, final_state, place, sequence, strides, 1, FORM)
    keys = place.start * heads + place.key_head
    q_norm, k_norm = final_state, final_state
    if FORM.NORMS:
        q_norm = norms + keys * 2
        k_norm = q_norm + 1
    barrier()
    saved = final_state
    if FORM.SAVE:
        saved = ChannelSaved(
            present(errors, scores), scores, present(corrections, scores), states, decayed_q,
            present(erase, write), write, present(scalings, chunk_decay), chunk_decay, fast_rows,
        )  # fmt: skip
    own = tiles, barriers, place, saved
    gates = log_decay, beta, q_norm, k_norm, value_heads * FORM.K, s_beta_t, heads * 2
    # Rows are counted from the sequence's start on, in 64 bits.
    apart = place.start * 0 + heads
    given = (
        q_rows + keys * FORM.K,
        k_rows + keys * FORM.K,
        apart * FORM.K,
        q_norm,
        k_norm,
        apart * 2,
    )
    states = initial_state, final_state, scale
    gl.warp_specialize(
        [
            (channel_state_role, (own, states, 0, FORM)),
            (channel_state_role, (own, states, 1, FORM)),
            (channel_score_role, (own, given, scale, FORM)),
            (load_role, (own, (q, k, v, decays), FORM)),
            (store_role, (own, o, False, FORM)),
            (channel_gate_role, (own, gates, 0, FORM)),
            (channel_gate_role, (own, gates, 1, FORM)),
        ],
        [4, 4, 1, 1, 1, 1],
        [STATE_REGISTERS, SCORE_REGISTERS, REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )
    end_barriers(barriers)
