"""Queries and keys divided by their norm, x / |x|: the norm, and the gradient through it."""

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)


@triton.jit
def inverse_norm(b_x):
    """1 / |x| of every row, in float32."""
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1) + EPSILON)


@triton.jit
def unit_norm_backward(b_x, b_norm, b_y):
    """dx = y - (x . y) x / |x|^2, where y = dx already divided by |x|."""
    b_x = b_x.to(tl.float32)
    return b_y - b_x * (tl.sum(b_x * b_y, axis=1) * b_norm * b_norm)[:, None]


@triton.jit(do_not_specialize=["rows"])
def unit_norm_gradients_kernel(x, d_x, rows, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """`unit_norm_backward` of rows of K channels, in place."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    o_x, m_x = o_r[:, None] * K + o_k[None, :], (o_r < rows)[:, None] & (o_k < K)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.load(d_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = unit_norm_backward(b_x, inverse_norm(b_x), b_y)
    tl.store(d_x + o_x, b_y.to(d_x.dtype.element_ty), mask=m_x)
