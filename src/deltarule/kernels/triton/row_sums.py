"""Sums along the rows of what products leave in registers: device functions."""

import triton
import triton.language as tl


@triton.jit
def identity(SIZE: tl.constexpr):
    """The identity matrix of so many rows, as a mask."""
    return tl.arange(0, SIZE)[:, None] == tl.arange(0, SIZE)[None, :]


@triton.jit
def diagonal(b_x):
    """The diagonal of a square matrix."""
    return tl.sum(tl.where(identity(b_x.shape[0]), b_x, 0.0), axis=1)


@triton.jit
def operand_products(b_x, b_y, PRECISION: tl.constexpr):
    """x . y of every row, where x is an operand of products and y the result of one.

    A product with the identity takes x to the registers in which y lies. Read as they are, rows
    of x would lie in others, and of both all would go through memory before they meet.
    """
    if PRECISION != "tf32x3":
        b_x = tl.dot(identity(b_x.shape[0]).to(b_x.dtype), b_x)
    return tl.sum(b_x * b_y, axis=1)
