"""Sums over the pairs of rows of a chunk whose channels decay apart, where no block decays far.

Where no lead of a block of 16 rows falls far below 0, near_j = 2^-lead_j is a number like any
other, and the decay between rows of a block is near_j 2^lead_i. What a block adds is counted from
its start, and carried over whole blocks, of decay B_J, to where it goes:

    rows       dx = S^T (..)    for J = 0..3: dx += sum_j in J G_ij near_j y_j,
                                              of the rows in later blocks dx *= B_J
               dx_i *= 2^lead_i
    columns    dy = 0           for I = 3..0: of the columns in blocks up to I dy *= B_I (I < 3),
                                              dy += sum_i in I G_ij 2^lead_i x_i
               dy_j = near_j dy_j + decay(j, end] D^T (..)
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_decay import (
    AFTER,
    BEFORE,
    BLOCK,
    EARLY,
    LATE,
    load_sums,
)
from deltarule.kernels.triton.channel_tiles import load_tile


@triton.jit
def split(b_x, low: tl.constexpr):
    """x as two numbers of a type: what two sums share must cancel to more digits than it has."""
    if low == tl.bfloat16:
        # The upper half of a float32 is a bfloat16.
        b_high = (b_x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    else:
        b_high = b_x.to(low).to(tl.float32)
    return b_high.to(low), (b_x - b_high).to(low)


@triton.jit
def product(b_g, b_x, b_low, b_sum, PRECISION: tl.constexpr):
    """b_sum + G (x + low); float32 leaves nothing below."""
    b_sum = tl.dot(b_g, b_x, acc=b_sum, input_precision=PRECISION)
    if PRECISION != "tf32x3":
        b_sum = tl.dot(b_g, b_low, acc=b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def block_decay(p_s, o_k, which: tl.constexpr, K: tl.constexpr):
    """The decay of all rows of a block, [1, BC], from where the sums have it."""
    late = LATE + 3 if which == 2 else AFTER + 2
    row = BEFORE + 1 if which == 0 else EARLY if which == 1 else late
    return tl.load(p_s + row * K + o_k, mask=o_k < K, other=0.0)[None, :]


@triton.jit
def to_end(p_s, b_all, o_r, o_k, K: tl.constexpr):
    """For each row the decay from its block's start to the chunk's end."""
    o_i, p_s, m_k = o_r[:, None], p_s + AFTER * K + o_k, o_k < K
    b_1 = tl.load(p_s, mask=m_k, other=0.0)[None, :]
    b_2 = tl.load(p_s + K, mask=m_k, other=0.0)[None, :]
    b_3 = tl.load(p_s + 2 * K, mask=m_k, other=0.0)[None, :]
    b_early = tl.where(o_i < BLOCK, b_all[None, :], b_1)
    return tl.where(o_i < 2 * BLOCK, b_early, tl.where(o_i < 3 * BLOCK, b_2, b_3))


@triton.jit
def norms(p_n, o_r, UNIT_NORM: tl.constexpr):
    """1 / |x| of the rows o_r as a column, from where the kernel left them; or 1."""
    b_norm = 1.0
    if UNIT_NORM:
        b_norm = tl.load(p_n + o_r)[:, None]
    return b_norm


@triton.jit
def row_gradients(
    p_k, p_p, p_s, p_n, b_dq, b_dx, rows, o_k, stride, K: tl.constexpr, BT: tl.constexpr,
    ERASE: tl.constexpr, UNIT_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx of the rows of q and of k, without the last factor: see the head of this page."""
    low: tl.constexpr = p_p.dtype.element_ty
    o_i, o_b = tl.arange(0, BT)[:, None], tl.arange(0, BLOCK)
    for J in tl.static_range(4):
        o_j = J * BLOCK + o_b
        b_k = load_tile(p_k, o_j, o_j < rows, o_k, stride, K) * norms(p_n + BT, o_j, UNIT_NORM)
        b_k, b_low = split(b_k * tl.exp2(-load_sums(p_s, o_j, o_k, K)), low)
        b_g = tl.load(p_p + o_i * BT + o_j[None, :])
        b_dq = product(b_g, b_k, b_low, b_dq, PRECISION)
        if ERASE == "tied":
            b_g = tl.load(p_p + BT * BT + o_i * BT + o_j[None, :])
            b_dx = product(b_g, b_k, b_low, b_dx, PRECISION)
        if J < 3:
            b_carry = tl.where(o_i >= (J + 1) * BLOCK, block_decay(p_s, o_k, J, K), 1.0)
            b_dq *= b_carry
            if ERASE == "tied":
                b_dx *= b_carry
    return b_dq, b_dx


@triton.jit
def column_gradients(
    p_q, p_k, p_p, p_s, p_n, rows, o_k, stride, K: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, N_STEPS: tl.constexpr, ERASE: tl.constexpr, UNIT_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dy of the columns k, without the factor near: see the head of this page."""
    low: tl.constexpr = p_p.dtype.element_ty
    o_j, o_b = tl.arange(0, BT), tl.arange(0, BLOCK)
    b_dy = tl.zeros([BT, BC], tl.float32)
    for up in tl.static_range(4):
        o_i = (3 - up) * BLOCK + o_b
        m_i = o_i < rows
        m_q = m_i & (o_i % N_STEPS == N_STEPS - 1)
        if up > 0:
            m_y = o_j[:, None] < (4 - up) * BLOCK
            b_dy *= tl.where(m_y, block_decay(p_s, o_k, 3 - up, K), 1.0)
        b_lead = tl.exp2(load_sums(p_s, o_i, o_k, K))
        b_q = load_tile(p_q, o_i // N_STEPS, m_q, o_k, stride, K)
        b_q, b_low = split(b_q * norms(p_n, o_i, UNIT_NORM) * b_lead, low)
        b_g = tl.load(p_p + o_i[:, None] * BT + o_j[None, :])
        b_dy = product(tl.trans(b_g), b_q, b_low, b_dy, PRECISION)
        if ERASE == "tied":
            b_k = load_tile(p_k, o_i, m_i, o_k, stride, K)
            b_k, b_low = split(b_k * norms(p_n + BT, o_i, UNIT_NORM) * b_lead, low)
            b_g = tl.load(p_p + BT * BT + o_i[:, None] * BT + o_j[None, :])
            b_dy = product(tl.trans(b_g), b_k, b_low, b_dy, PRECISION)
    return b_dy


@triton.jit
def suffix_sums(b_z):
    """For each row the sum of the rows from it on."""
    return tl.sum(b_z, axis=0)[None, :] - tl.cumsum(b_z, axis=0) + b_z
