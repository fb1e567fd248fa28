"""Decays inside a chunk in which no channel decays far, from one anchor: device functions.

With c_i the sum of base-2 log decays from the chunk's start, which is in the past of every pair, to
row i, all pairs of rows take one product:

    decay(j, i] = 2^(c_i + SHIFT) 2^-(c_j + SHIFT)

SHIFT makes a part of the exponents positive, so that float32 has room for c down to -RANGE; both
leave 2^60 or so to what is multiplied, tiny gradients and large keys. Rows whose c is lower are
left to channel_steep.py: as c never grows, these are the last of a chunk, and that a later decay is
strong changes no digit of an earlier row.

Tiles of rows are [BT // DEEP, DEEP, channels]: a thread has DEEP rows that follow each other, and
adds up their decays on its own.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_decay import GONE
from deltarule.kernels.triton.decay import LOG2_E, RESET


@triton.jit
def rows_of(BT: tl.constexpr, DEEP: tl.constexpr):
    """The rows of a tile, [BT // DEEP, DEEP, 1]."""
    return tl.arange(0, BT // DEEP)[:, None, None] * DEEP + tl.arange(0, DEEP)[None, :, None]


@triton.jit
def deep(b_x, DEEP: tl.constexpr):
    """A number of every row as [rows // DEEP, DEEP, 1]."""
    return tl.reshape(b_x, (b_x.shape[0] // DEEP, DEEP, 1))


@triton.jit
def flat(b_x):
    """[rows // DEEP, DEEP, channels] as [rows, channels]."""
    return tl.reshape(b_x, (b_x.shape[0] * b_x.shape[1], b_x.shape[2]))


@triton.jit
def load_deep(p_x, o_r, m_r, o_k, stride, K: tl.constexpr):
    """Rows o_r (addresses p_x apart by stride) and channels o_k, as they are."""
    return tl.load(p_x + o_r * stride + o_k, mask=m_r & (o_k < K), other=0.0)


@triton.jit
def store_deep(p_x, o_r, o_k, b_x, K: tl.constexpr, m_r):
    """Write rows o_r, apart by K, and channels o_k."""
    tl.store(p_x + o_r * K + o_k, b_x.to(p_x.dtype.element_ty), mask=m_r & (o_k < K))


@triton.jit
def load_decays(p_g, o_r, rows, o_k, s_t, s_k, K: tl.constexpr, N_STEPS: tl.constexpr):
    """Log decays to base 2; the first of each token's rows decays."""
    mask = (o_r < rows) & (o_r % N_STEPS == 0) & (o_k < K)
    b_g = tl.load(p_g + o_r // N_STEPS * s_t + o_k * s_k, mask=mask, other=0.0).to(tl.float32)
    return tl.where(b_g < RESET, GONE, b_g * LOG2_E)


@triton.jit
def followed_by(before, own, before_next, own_next):
    """Two stretches as one: the sum of all but the last row of a scan, and of all."""
    return own + before_next, own + own_next


@triton.jit
def sums_from_start(b_g):
    """For each row the sum of the rows up to it, and that of all rows, [1, 1, channels].

    No sum takes a later row in and out again, which would cost it digits.
    """
    b_some = tl.sum(b_g, axis=1)
    b_before, _ = tl.associative_scan((b_some * 0.0, b_some), 0, followed_by)
    return tl.cumsum(b_g, axis=1) + b_before[:, None, :], tl.sum(b_some, axis=0)[None, None, :]


@triton.jit
def count_even_rows(
    p_g, rows, s_t, s_k, K: tl.constexpr, N_STEPS: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, DEEP: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """How many rows of a chunk come before the first for which a channel is below -RANGE."""
    o_r = rows_of(BT, DEEP)
    b_least = tl.zeros([BT // DEEP, DEEP], tl.float32)
    for i_k in range(0, K, BC):
        o_k = i_k + tl.arange(0, BC)[None, None, :]
        b_c, _ = sums_from_start(load_decays(p_g, o_r, rows, o_k, s_t, s_k, K, N_STEPS))
        b_least = tl.minimum(b_least, tl.min(b_c, axis=2))
    return tl.sum(tl.sum((b_least >= -RANGE).to(tl.int32), axis=1), axis=0)
