"""Sums over rows and pairs of rows that the gradient by a decay is made of: device functions."""

import triton
import triton.language as tl

from deltarule.kernels.triton.decay import RESET
from deltarule.kernels.triton.tiles import BETA, load_errors, load_rows, row_scaling


@triton.jit
def pair_decays(decays, i_slot, o_i, o_j, N_STEPS: tl.constexpr, BT: tl.constexpr):
    """The decay after row j up to the last row of token i."""
    p_r = decays + i_slot * BT * BT + ((o_i * N_STEPS + N_STEPS - 1) % BT)[:, None] * BT
    return tl.load(p_r + o_j[None, :]).to(tl.float32)


@triton.jit
def sums_around(b_from, b_before, o_r, PRECISION: tl.constexpr):
    """For every row the sum of b_from from it on, and that of b_before before it."""
    if PRECISION == "tf32x3":
        b_sum = tl.cumsum(b_from, axis=0, reverse=True) + tl.cumsum(b_before, axis=0) - b_before
    else:
        later = o_r[None, :] >= o_r[:, None]
        b_sum = tl.sum(tl.where(later, b_from[None, :], b_before[None, :]), axis=1)
    return b_sum


@triton.jit
def row_products(p_x, b_y, o_r, m_r, o_k, stride, K: tl.constexpr):
    """x . y of every row, x read again."""
    b_x = load_rows(p_x, o_r, m_r, o_k, K, stride, b_y.shape[1] == K)
    return tl.sum(b_x.to(tl.float32) * b_y, axis=1)


@triton.jit
def store_decay_gradients(p_dg, log_decay, b_dg, o_t, m_t, s_decay_t, HV: tl.constexpr):
    """Store the gradient by the decays of the tokens o_t; a reset has none."""
    b_decay = tl.load(log_decay + o_t * s_decay_t, mask=m_t, other=0.0)
    tl.store(p_dg + o_t * HV, tl.where(b_decay < RESET, 0.0, b_dg), mask=m_t)


@triton.jit
def pairs_across(b_z, o_t, o_i, o_j, PRECISION: tl.constexpr):
    """Of pairs of rows i and columns j the sum of those with i >= t > j, for every t of o_t."""
    later = (o_i[None, :] >= o_t[:, None]).to(tl.float32)
    b_later = tl.dot(later, b_z, input_precision=PRECISION)
    return tl.sum(tl.where(o_j[None, :] < o_t[:, None], b_later, 0.0), axis=1)


@triton.jit
def pair_decay_gradients(
    p_q, p_k, norm_q, norm_k, v, log_decay, scalings, decays, errors, d_o, d_errors, d_log_decay,
    first, tokens, i_h, i_slot, s_decay_t,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TIED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the part of dlog_decay that pairs of rows have."""
    o_i, o_r, o_k = tl.arange(0, BQ), tl.arange(0, BT), tl.arange(0, BK)
    rows, m_i = tokens * N_STEPS, o_i < tokens
    p_do, p_x = d_o + (first * HV + i_h) * V, d_errors + i_slot * BT * V
    WHOLE_V: tl.constexpr = V % BV == 0
    b_gp, b_gm = tl.zeros([BQ, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = load_rows(p_do, o_i, m_i, o_v, V, HV * V, WHOLE_V)
        b_e = load_errors(
            v, errors, first, rows, i_h, i_slot, o_r, o_v, HV, V, N_STEPS, BT, BV, TIED
        )
        b_gp = tl.dot(b_do, tl.trans(b_e), acc=b_gp, input_precision=PRECISION)
        if TIED:
            b_x = load_rows(p_x, o_r, o_r < BT, o_v, V, V, WHOLE_V)
            b_gm = tl.dot(b_x, tl.trans(b_e), acc=b_gm, input_precision=PRECISION)
    b_key = norm_k * row_scaling(scalings, i_slot, BETA, 1.0, o_r, BT, TIED)
    b_q = load_rows(p_q, o_i, m_i, o_k, K, H * K, K == BK)
    b_k = load_rows(p_k, o_r, o_r < rows, o_k, K, H * K, K == BK)
    b_gp *= tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_gp *= pair_decays(decays, i_slot, o_i, o_r, N_STEPS, BT)
    m_pair = o_r[None, :] // N_STEPS <= o_i[:, None]
    b_gp = tl.where(m_pair, b_gp * norm_q[:, None] * b_key[None, :], 0.0)
    b_dg = pairs_across(b_gp, o_i, o_i, o_r // N_STEPS, PRECISION)
    if TIED:
        b_gm *= tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
        b_gm *= pair_decays(decays, i_slot, o_r, o_r, 1, BT)
        m_before = o_r[:, None] > o_r[None, :]
        b_gm = tl.where(m_before, b_gm * -b_key[:, None] * b_key[None, :], 0.0)
        b_dg += pairs_across(b_gm, o_i * N_STEPS, o_r, o_r, PRECISION)
    p_dg = d_log_decay + first * HV + i_h
    store_decay_gradients(p_dg, log_decay, b_dg, o_i, m_i, s_decay_t, HV)
