"""The delta rule's forward as one kernel of several roles, for Hopper: a decay per channel.

A program has one value head of one sequence, and its roles go through the chunks as in forward.py:

    load ----- q k v ---+                                        +--- o ----> store
                        v                                        |
    gates ---- b ... -> slot -> score ------ may go on --> state roles (64 rows of S each)
    gates ------ sums --------> score <-- q, k scaled ---> state roles <-- P --> each other
                        ^       score -------- T --------> state roles
                        |                                        |
                        +---------------- empty -----------------+

What differs from a decay per head is what the roles of scores, states and gates do; those that move
tiles are the same. Everything is read once, and nothing is written but o and the final state.
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
from deltarule.ops.delta_rule.gluon.forward import first_gate, own_states, place_of
from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES, Form
from deltarule.ops.delta_rule.gluon.movers import load_role, store_role
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, present

GENERAL = ["T", "s_beta_b", "s_beta_t", "s_beta_h"]


@gluon.jit(do_not_specialize=GENERAL)
def channel_forward_kernel(
    q, k, v, o, decays, errors, scores, corrections, q_rows, k_rows, states, decayed_q,
    erase, write, scalings, chunk_decay, fast_rows, log_decay, beta, norms, cu_seqlens,
    initial_state, final_state, scale, T, heads, value_heads, s_beta_b, s_beta_t, s_beta_h,
    K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr, TIED: gl.constexpr, UNIT: gl.constexpr,
    PACKED: gl.constexpr, ENDS: gl.constexpr, SAVE: gl.constexpr,
    STATE_REGISTERS: gl.constexpr, SCORE_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, k and log_decay twice: as descriptors of tiles, and as addresses of rows.

    log_decay (`decays`) [B, T, HV, K] lies in one piece, in float32. States are [N, HV, V, K]. With
    SAVE what lies between is left for a backward, as far as this form of the call has it. The first
    state role has the registers that the others leave.
    """
    PARTS: gl.constexpr = V // VALUES
    place, sequence = place_of(cu_seqlens, T, heads, value_heads, PACKED, CHUNK)
    tiles = new_channel_tiles(q.dtype, K, PARTS, SLOTS, TIED)
    barriers = new_channel_barriers(PARTS, SLOTS, TIED)
    INITIAL: gl.constexpr = initial_state is not None
    initial_state, final_state = own_states(initial_state, final_state, place, sequence, V * K)
    log_decay += (place.start * value_heads + place.value_head) * K
    if TIED:
        row, token = first_gate(place, sequence, PACKED)
        beta += row * s_beta_b + token * s_beta_t + place.value_head * s_beta_h
    else:
        beta = final_state
    keys = place.start * heads + place.key_head
    q_norm, k_norm = final_state, final_state
    if UNIT:
        q_norm = norms + keys * 2
        k_norm = q_norm + 1
    barrier()
    FORM: gl.constexpr = Form(
        TIED, False, False, ENDS, NORMS=UNIT, KEYS=K, WIDTH=V, INITIAL=INITIAL, SAVE=SAVE
    )
    saved = final_state
    if SAVE:
        saved = ChannelSaved(
            present(errors, scores), scores, present(corrections, scores), states, decayed_q,
            present(erase, write), write, present(scalings, chunk_decay), chunk_decay, fast_rows,
        )  # fmt: skip
    own = tiles, barriers, place, saved
    gates = log_decay, beta, q_norm, k_norm, value_heads * K, s_beta_t, heads * 2
    # Rows are counted from the sequence's start on, in 64 bits.
    apart = place.start * 0 + heads
    given = q_rows + keys * K, k_rows + keys * K, apart * K, q_norm, k_norm, apart * 2
    states = initial_state, final_state, scale
    gl.warp_specialize(
        [
            (channel_state_role, (own, states, 0, PARTS, K, SLOTS, FORM)),
            (channel_state_role, (own, states, 1, PARTS, K, SLOTS, FORM)),
            (channel_score_role, (own, given, scale, K, SLOTS, FORM)),
            (load_role, (own, (q, k, v, decays), K, PARTS, SLOTS, FORM)),
            (store_role, (own, o, PARTS, False, FORM)),
            (channel_gate_role, (own, gates, 0, K, SLOTS, FORM)),
            (channel_gate_role, (own, gates, 1, K, SLOTS, FORM)),
        ],
        [4, 4, 1, 1, 1, 1],
        [STATE_REGISTERS, SCORE_REGISTERS, REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )
    end_barriers(barriers)
