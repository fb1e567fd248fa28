"""The gradient by the decays of a head, from the sums over rows and pairs that it is made of.

A decay at the first row t of a token reaches every row from there on, every row before, and the
state of the chunk's start:

    dlog_decay_t = sum_{i >= t} later_i + sum_{j < t} before_j + held (+ across_t)
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.chunk import slab_chunk
from deltarule.kernels.triton.decay import RESET, decay_ratio
from deltarule.kernels.triton.head_sums import load_chunk_sums
from deltarule.kernels.triton.row_sums import diagonal
from deltarule.kernels.triton.tiles import (
    BETA,
    SCALINGS,
    load_chunk,
    load_errors,
    load_rows,
    row_scaling,
)
from deltarule.kernels.triton.unit_norm import inverse_norm

# Rows of the parts [SLICES, M, HV, 4, BT] of a chunk: of its queries, of its keys, of what they
# write, and in the last what adds up to <D, S>. A slice beyond holds the sums across, in its first.
QUERIES, KEYS, WRITES, HELD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit(do_not_specialize=["T", "N", "s_slice", "per_segment", "slab", "per_slab"])
def decay_gradients_kernel(
    parts, log_decay, cu_seqlens, d_log_decay, T, N, s_decay_b, s_decay_t, s_decay_h, s_slice,
    HV: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SLICES: tl.constexpr, PAIRS: tl.constexpr, PACKED: tl.constexpr, per_segment=None,
    SPLIT: tl.constexpr = "none", slab=None, per_slab=None, SLAB: tl.constexpr = "none",
):  # fmt: skip
    """One chunk of one value head, BD numbers of whose HELD count; a reset gets no gradient."""
    number, i_h = tl.program_id(0), tl.program_id(1)
    first, tokens, _ = slab_chunk(
        number, cu_seqlens, T, N, per_segment, slab, per_slab, CT, SPLIT, SLAB, PACKED
    )  # fmt: skip
    if tokens <= 0:
        return
    o_r = tl.arange(0, BT)
    o_t, m_t = o_r // N_STEPS, o_r % N_STEPS == 0
    p_x = parts + (number.to(tl.int64) * HV + i_h) * 4 * BT
    b_later, b_before = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    b_held = 0.0
    for i_c in tl.static_range(SLICES):
        p_c = p_x + i_c * s_slice
        b_later += tl.load(p_c + QUERIES * BT + o_t, mask=m_t, other=0.0)
        b_later += tl.load(p_c + KEYS * BT + o_r)
        b_before += tl.load(p_c + WRITES * BT + o_r)
        b_held += tl.sum(tl.load(p_c + HELD * BT + tl.arange(0, BD)), axis=0)
    b_dg = tl.cumsum(b_later, axis=0, reverse=True) + tl.cumsum(b_before, axis=0) - b_before
    b_dg += b_held
    if PAIRS:
        b_dg += tl.load(p_x + SLICES * s_slice + o_t)
    m_t &= o_r < tl.minimum(tokens, CT) * N_STEPS
    p_g = log_decay + (first // T) * s_decay_b + (first % T + o_t) * s_decay_t + i_h * s_decay_h
    b_g = tl.load(p_g, mask=m_t, other=0.0)
    p_dg = d_log_decay + (first + o_t) * HV + i_h
    tl.store(p_dg, tl.where(b_g < RESET, 0.0, b_dg), mask=m_t)


@triton.jit
def no_held(BV: tl.constexpr, PRECISION: tl.constexpr):
    """What `add_held` starts with."""
    if PRECISION == "tf32x3":
        b_held = tl.zeros([BV], tl.float32)
    else:
        b_held = tl.zeros([BV, BV], tl.float32)
    return b_held


@triton.jit
def add_held(b_held, b_d, b_s, PRECISION: tl.constexpr):
    """With <D, S> of further rows: in 16 bits in the diagonal of D S^T, so that a loop with
    products has one product more and reads no tile; in float32, where that takes many, row by row.
    """
    if PRECISION == "tf32x3":
        b_held += tl.sum(b_d * b_s, axis=1)
    else:
        b_held = tl.dot(b_d, tl.trans(b_s), acc=b_held)
    return b_held


@triton.jit
def store_held(p_part, b_held, b_chunk, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Leave numbers whose sum is <D, S> times the chunk's decay: BT of them at most."""
    if PRECISION != "tf32x3":
        b_held = diagonal(b_held)
    tl.store(p_part + HELD * BT + tl.arange(0, b_held.shape[0]), b_held * b_chunk)


@triton.jit
def pairs_across(b_z, o_t, o_i, o_j, PRECISION: tl.constexpr):
    """Of pairs of rows i and columns j the sum of those with i >= t > j, for every t of o_t."""
    later = (o_i[None, :] >= o_t[:, None]).to(tl.float32)
    b_later = tl.dot(later, b_z, input_precision=PRECISION)
    return tl.sum(tl.where(o_j[None, :] < o_t[:, None], b_later, 0.0), axis=1)


@triton.jit
def pair_decay_gradients(
    p_q, p_k, v, scalings, errors, d_o, d_errors, p_dg, scale, first, tokens, i_h, i_slot, i_kept,
    i_own,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TIED: tl.constexpr,
    UNIT_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the part of dlog_decay that pairs of rows have."""
    o_i, o_r, o_k = tl.arange(0, BQ), tl.arange(0, BT), tl.arange(0, BK)
    rows, m_i = tokens * N_STEPS, o_i < tokens
    p_do = d_o + (first * HV + i_h) * V
    b_gp, b_gm = tl.zeros([BQ, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = load_rows(p_do, o_i, m_i, o_v, V, HV * V, V % BV == 0)
        b_e = load_errors(
            v, errors, first * N_STEPS, rows, i_h, i_kept, i_v, HV, V, BT, BV, TIED, False
        )
        b_gp = tl.dot(b_do, tl.trans(b_e), acc=b_gp, input_precision=PRECISION)
        if TIED:
            b_x = load_chunk(d_errors, i_own, i_v, V, BT, BV, False)
            b_gm = tl.dot(b_x, tl.trans(b_e), acc=b_gm, input_precision=PRECISION)
    b_q = load_rows(p_q, o_i, m_i, o_k, K, H * K, K == BK)
    b_k = load_rows(p_k, o_r, o_r < rows, o_k, K, H * K, K == BK)
    b_beta = row_scaling(scalings, i_slot, BETA, tl.full([BT], 1.0, tl.float32), o_r, BT, TIED)
    b_read, b_key = tl.full([BQ], scale, tl.float32), b_beta
    if UNIT_NORM:
        b_read, b_key = b_read * inverse_norm(b_q), b_key * inverse_norm(b_k)
    p_s = scalings + i_slot * SCALINGS * BT
    whole, rest, whole_q, rest_q = load_chunk_sums(p_s, o_r, o_i, N_STEPS, BT)
    b_gp *= tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_gp *= decay_ratio(whole_q[:, None], rest_q[:, None], whole[None, :], rest[None, :])
    m_pair = o_r[None, :] // N_STEPS <= o_i[:, None]
    b_gp = tl.where(m_pair, b_gp * b_read[:, None] * b_key[None, :], 0.0)
    b_dg = pairs_across(b_gp, o_i, o_i, o_r // N_STEPS, PRECISION)
    if TIED:
        b_gm *= tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
        b_gm *= decay_ratio(whole[:, None], rest[:, None], whole[None, :], rest[None, :])
        m_before = o_r[:, None] > o_r[None, :]
        b_gm = tl.where(m_before, b_gm * -b_key[:, None] * b_key[None, :], 0.0)
        b_dg += pairs_across(b_gm, o_i * N_STEPS, o_r, o_r, PRECISION)
    tl.store(p_dg + o_i, b_dg)
