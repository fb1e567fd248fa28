"""Scores of the pairs of rows of chunks, of the roles that make them in the fused forward.

A program takes a run of chunks of one value head. Several share a multiprocessor, so that one
computes while another waits; what they leave is what triton/scores.py does: P, N and the scalings.

    load ----- q k --+
                     +--> slot --> scores: P = q . k with decays, M, N = -(I + M B)^-1 M
    gates --- sums --+
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from deltarule.ops.delta_rule.gluon.forward import GENERAL, new_tiles
from deltarule.ops.delta_rule.gluon.gates import gate_role
from deltarule.ops.delta_rule.gluon.inverse import invert, invert_blocks
from deltarule.ops.delta_rule.gluon.memory import CHUNK, Barriers, Place, Saved
from deltarule.ops.delta_rule.gluon.movers import load_rows, room
from deltarule.ops.delta_rule.gluon.products import score_places
from deltarule.ops.delta_rule.gluon.score import finish_pairs, leave_m, start_pairs
from deltarule.ops.runtime.gluon_tiles import barrier, end_barriers, new_barrier, present


@gluon.jit
def run_of(T, heads, value_heads, per_program):
    """The chunks of this program, and their sequence."""
    program, chunks = gl.program_id(0), T // CHUNK
    runs = (chunks + per_program - 1) // per_program
    value_head, run = program % value_heads, program // value_heads
    sequence, first = run // runs, run % runs * per_program
    start = sequence.to(gl.int64) * T + first * CHUNK
    slot = (sequence * chunks + first) * value_heads + value_head
    place = Place(
        start, T - first * CHUNK, gl.minimum(per_program, chunks - first), value_head,
        value_head // (value_heads // heads), value_heads, slot,
    )  # fmt: skip
    return place, sequence, first * CHUNK


@gluon.jit
def load_role(shared, q, k, FORM: gl.constexpr):
    """One warp: k, and where P is left q."""
    tiles, barriers, place, _ = shared
    KEYS: gl.constexpr = 2 if FORM.SCORES else 1
    for i in range(place.chunks):
        full = room(barriers.full, barriers.empty, (i & 1) ^ 1, CHUNK * KEYS * FORM.K * 2)
        token, column = place.start.to(gl.int32) + i * CHUNK, place.key_head * FORM.K
        load_rows(k, token, full, tiles.k.index(0), column)
        if FORM.SCORES:
            load_rows(q, token, full, tiles.q.index(0), column)


@gluon.jit
def pair_role(shared, of_gates, scale, places, FORM: gl.constexpr):
    tiles, barriers, place, saved = shared
    full, empty = of_gates
    for i in range(place.chunks):
        row, phase = (place.slot + i * place.value_heads) * CHUNK, i & 1
        mbarrier.wait(barriers.full.index(0), phase)
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        # What was left here has gone.
        tma.store_wait(0)
        barrier()
        if FORM.SCORES:
            kq = start_pairs(tiles, 0, places, 0, CHUNK)
            finish_pairs(tiles, i % 2, 0, scale, kq, places, phase, 0, CHUNK, FORM)
        minus_l, minus_l_t, minus_m = leave_m(tiles, 0, i % 2, places, phase, FORM)
        # A barrier of the role, too.
        mbarrier.arrive(barriers.empty.index(0))
        n = invert(tiles, 0, i % 2, invert_blocks(minus_l, minus_l_t), minus_m, True)
        tiles.u.index(0).store(n.to(tiles.u.dtype))
        fence_async_shared()
        mbarrier.arrive(empty.index(i % 2))
        if FORM.SCORES:
            tma.async_copy_shared_to_global(saved.scores, [row, 0], tiles.p.index(0))
        tma.async_copy_shared_to_global(saved.corrections, [row, 0], tiles.u.index(0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "value_heads", "per_program", *GENERAL])
def segment_scores_kernel(
    q, k, scores, corrections, scalings, chunk_decay, log_decay, beta, scale, log_scale, T, heads,
    value_heads, per_program, s_decay_b, s_decay_t, s_decay_h, s_beta_b, s_beta_t, s_beta_h,
    FORM: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors up to corrections; q and scores may be None."""
    place, sequence, token = run_of(T, heads, value_heads, per_program)
    tiles = new_tiles(k.dtype, FORM)
    q, scores = present(q, k), present(scores, corrections)
    full, empty, unused = new_barrier(2, 1), new_barrier(2, 1), new_barrier(1, 1)
    barriers = Barriers(new_barrier(1, 1), new_barrier(1, 1), unused, unused, unused, unused)
    log_decay += sequence.to(gl.int64) * s_decay_b + token.to(gl.int64) * s_decay_t
    log_decay += place.value_head * s_decay_h
    beta += sequence.to(gl.int64) * s_beta_b + token.to(gl.int64) * s_beta_t
    beta += place.value_head * s_beta_h
    barrier()
    saved = Saved(scores, scores, scores, scores, corrections, scalings, chunk_decay)
    own, places = (tiles, barriers, place, saved), score_places(FORM)
    of_gates = tiles, Barriers(full, empty, unused, unused, unused, unused), place, saved
    given = log_decay, beta, chunk_decay, s_decay_t, s_beta_t, 0, scale, log_scale
    gl.warp_specialize(
        [
            (pair_role, (own, (full, empty), scale, places, FORM)),
            (load_role, (own, q, k, FORM)),
            (gate_role, (of_gates, given, 2, FORM)),
        ],
        [1, 1],
        [REGISTERS, REGISTERS],
    )
    end_barriers((barriers.full, barriers.empty, full, empty, unused))
