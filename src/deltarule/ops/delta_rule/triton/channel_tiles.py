"""Tiles of rows whose channels decay apart: what fast and exact kernels read and write alike."""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.tiles import EPSILON, load_slot

# beta and log_decay of all rows with their strides, and T.
Gates = namedtuple(
    "Gates", "beta log_decay T s_beta_b s_beta_t s_beta_h s_decay_b s_decay_t s_decay_h s_decay_k"
)


@triton.jit
def load_beta(g, first, i_h, o_r, m_r, S: tl.constexpr):
    p_beta = g.beta + first // g.T * g.s_beta_b + first % g.T * S.N_STEPS * g.s_beta_t
    p_beta += i_h * g.s_beta_h
    return tl.load(p_beta + o_r * g.s_beta_t, mask=m_r, other=0.0).to(tl.float32)


@triton.jit
def load_channels(p_x, o_r, m_r, o_k, stride, K: tl.constexpr):
    """Rows o_r (addresses p_x apart by stride) and channels o_k, in float32."""
    mask = m_r[:, None] & (o_k < K)[None, :]
    return tl.load(p_x + o_r[:, None] * stride + o_k[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def inverse_norms(p_x, o_r, m_r, S: tl.constexpr):
    """1 / |x| of every row of q or k, or ones."""
    b_norm = tl.full(o_r.shape, 1.0, tl.float32)
    if S.UNIT_NORM:
        b_square = tl.zeros(o_r.shape, tl.float32)
        for i_k in range(0, S.K, S.BC):
            b_x = load_channels(p_x, o_r, m_r, i_k + tl.arange(0, S.BC), S.H * S.K, S.K)
            b_square += tl.sum(b_x * b_x, axis=1)
        b_norm = tl.rsqrt(b_square + EPSILON)
    return b_norm


@triton.jit
def store_square(x, i_slot, b_x, start, BT: tl.constexpr):
    """Write the rows from `start` on of a chunk's tile of a tensor [M, HV, BT, BT]."""
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    p_x = x + i_slot * BT * BT + o_i * BT + o_j
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=(o_i >= start) & (o_j >= 0))


@triton.jit
def store_scores(scores, i_slot, o_r, b_s, start, S: tl.constexpr):
    """Write the rows from `start` on that are queries, [BQ, BT] of a chunk, up to the diagonal."""
    o_i, o_j = o_r[:, None], o_r[None, :]
    p_s = scores + i_slot * S.BQ * S.BT
    b_s = tl.where(o_j <= o_i, b_s, 0.0).to(scores.dtype.element_ty)
    m_s = (o_i % S.N_STEPS == S.N_STEPS - 1) & (o_i >= start)
    tl.store(p_s + o_i // S.N_STEPS * S.BT + o_j, b_s, mask=m_s)
    if S.N_STEPS * S.BQ > S.BT:
        o_q = tl.arange(0, S.BQ)[:, None]
        b_zero = tl.zeros([S.BQ, S.BT], scores.dtype.element_ty)
        tl.store(p_s + o_q * S.BT + o_j, b_zero, mask=o_q >= S.CT)


@triton.jit
def value_gradients(b_d, b_do, b_x, b_k, x, i_slot, o_i, o_r, S: tl.constexpr):
    """A free erase's dv [BV, BT], from D and X, both rounded, and rows b_k along which v goes."""
    b_dv = tl.dot(b_d, tl.trans(b_k), input_precision=S.PRECISION)
    b_p = load_slot(x.value_scores, i_slot, o_i, o_r, S.BQ, S.BT, S)
    b_dv = tl.dot(tl.trans(b_do), b_p, acc=b_dv, input_precision=S.PRECISION)
    b_l = load_slot(x.from_values, i_slot, o_r, o_r, S.BT, S.BT, S)
    return tl.dot(b_x, b_l, acc=b_dv, input_precision=S.PRECISION)
