"""What the pairs of rows around a decay add to its gradient, for float32.

    across_t = sum_{i >= t > j} (GP_ij q_i . k_j + GM_ij k_i . k_j)        names: gradients.py

In 16 bits the same comes of sums over rows, in which the pairs within cancel to float32; that is
too few digits for float32.
"""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton import tiles
from deltarule.ops.delta_rule.triton.tiles import SCALING, SCALINGS


@triton.jit
def pairs_across(b_z, o_t, o_i, o_j, PRECISION: tl.constexpr):
    """For every token t, sum o over the pairs of rows i and columns j with i >= t > j."""
    later = (o_i[None, :] >= o_t[:, None]).to(tl.float32)
    b_later = tl.dot(later, b_z, input_precision=PRECISION)
    return tl.sum(tl.where(o_j[None, :] < o_t[:, None], b_later, 0.0), axis=1)


@triton.jit
def pair_decay_gradients(p_q, p_k, x, scalings, p_dg, scale, at, S: tl.constexpr):
    """Store the part of dlog_decay that pairs of rows have."""
    o_i, o_r, o_k = tl.arange(0, S.BQ), tl.arange(0, S.BT), tl.arange(0, S.BK)
    m_i = o_i < at.tokens
    p_do = x.d_o + (at.first * S.HV + at.head) * S.V
    b_gp, b_gm = tl.zeros([S.BQ, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_do = tiles.load_rows(p_do, o_i, m_i, o_v, S.V, S.HV * S.V, S.V % S.BV == 0)
        b_e = tiles.load_errors(x, at, i_v, S)
        b_gp = tl.dot(b_do, tl.trans(b_e), acc=b_gp, input_precision=S.PRECISION)
        if S.TIED:
            b_x = tiles.load_chunk(x.d_errors, at.own, i_v, S.V, S.BT, S.BV, False)
            b_gm = tl.dot(b_x, tl.trans(b_e), acc=b_gm, input_precision=S.PRECISION)
    b_q = tiles.load_rows(p_q, o_i, m_i, o_k, S.K, S.H * S.K, S.K == S.BK)
    b_k = tiles.load_rows(p_k, o_r, o_r < at.rows, o_k, S.K, S.H * S.K, S.K == S.BK)
    b_one = tl.full([S.BT], 1.0, tl.float32)
    b_beta = tiles.row_scaling(scalings, at.slot, SCALING.BETA, b_one, o_r, S.TIED, S)
    b_read, b_key = tl.full([S.BQ], scale, tl.float32), b_beta
    if S.UNIT_NORM:
        b_read, b_key = b_read * tiles.inverse_norm(b_q), b_key * tiles.inverse_norm(b_k)
    p_s = scalings + at.slot * SCALINGS * S.BT
    whole, rest, whole_q, rest_q = tiles.load_chunk_sums(p_s, o_r, o_i, S.N_STEPS, S.BT)
    b_gp *= tl.dot(b_q, tl.trans(b_k), input_precision=S.PRECISION)
    b_gp *= tiles.pair_decays(whole_q, rest_q, whole, rest)
    m_pair = o_r[None, :] // S.N_STEPS <= o_i[:, None]
    b_gp = tl.where(m_pair, b_gp * b_read[:, None] * b_key[None, :], 0.0)
    b_dg = pairs_across(b_gp, o_i, o_i, o_r // S.N_STEPS, S.PRECISION)
    if S.TIED:
        b_gm *= tl.dot(b_k, tl.trans(b_k), input_precision=S.PRECISION)
        b_gm *= tiles.pair_decays(whole, rest, whole, rest)
        m_before = o_r[:, None] > o_r[None, :]
        b_gm = tl.where(m_before, b_gm * -b_key[:, None] * b_key[None, :], 0.0)
        b_dg += pairs_across(b_gm, o_i * S.N_STEPS, o_r, o_r, S.PRECISION)
    tl.store(p_dg + o_i, b_dg)
