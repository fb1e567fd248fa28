"""Gradients by the pairs of rows of a chunk whose channels decay apart: device functions.

With G_ij the gradient by a score and e_ij its decay, for every channel

    dx_i + sum_j G_ij e_ij y_j        dy_j + sum_i G_ij e_ij x_i

level by level, with the factors of channel_decay.py; what lies far down a block pair by pair.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.channel_decay import (
    BLOCK,
    EARLY,
    LATE,
    lead_decay,
    load_sums,
    near_decay,
    of_block,
    rounded,
    tail_decay,
)


class Sides(NamedTuple):
    """The rows x and x2 and the columns y and y2 of a chunk, for some channels."""

    b_x: tl.tensor
    b_x2: tl.tensor
    b_y: tl.tensor
    b_y2: tl.tensor


@triton.jit
def level_gradients(
    p_g, p_s, e, b_dx, b_dx2, b_dy, b_dy2, o_r, o_k, LEVEL: tl.constexpr, S: tl.constexpr
):
    """Add the pairs of one level, 0 in a block, 1 in a pair of blocks, 2 beyond:

    dx_i + late_i sum_j G_ij early_j y_j        dy_j + early_j sum_i G_ij late_i x_i
    """
    m_g = level_mask(S.BT, LEVEL)
    p_g += tl.arange(0, S.BT)[:, None] * S.BT + tl.arange(0, S.BT)[None, :]
    b_lead = load_sums(p_s, o_r, o_k, S.K)
    b_late = tl.exp2(b_lead)
    if LEVEL == 0:
        b_early = near_decay(b_lead, S.BAR)
    else:
        b_early = tail_decay(p_s, b_lead, o_r, o_k, S.K, S.EXACT)
    if LEVEL == 2:
        # Both are 0 wherever they do not belong, so that all of G may meet them.
        b_early *= of_block(p_s, EARLY, o_r, o_k, S.K)
        b_late *= of_block(p_s, LATE, o_r, o_k, S.K)
    b_zero = tl.zeros(b_dx.shape, tl.float32)
    b_read, b_write = e.b_x * b_late, e.b_y * b_early
    b_g = tl.load(p_g, mask=m_g, other=0.0)
    b_rows = product(b_g, b_write, b_zero, S.PRECISION)
    b_columns = product(tl.trans(b_g), b_read, b_zero, S.PRECISION)
    if S.ERASE == "free":
        b_write2 = e.b_y2 * b_early
        b_g = tl.load(p_g + 2 * S.BT * S.BT, mask=m_g, other=0.0)
        b_rows = product(b_g, b_write2, b_rows, S.PRECISION)
        b_columns2 = product(tl.trans(b_g), b_read, b_zero, S.PRECISION)
    b_dx += b_late * b_rows
    if S.ERASE != "none":
        b_late2 = b_late
        if S.ERASE == "free":
            b_late2 = lead_decay(p_s, o_r, o_k, S.K, False)
            if LEVEL == 2:
                b_late2 *= of_block(p_s, LATE, o_r, o_k, S.K)
        b_read = e.b_x2 * b_late2
        b_g = tl.load(p_g + S.BT * S.BT, mask=m_g, other=0.0)
        b_rows = product(b_g, b_write, b_zero, S.PRECISION)
        b_columns = product(tl.trans(b_g), b_read, b_columns, S.PRECISION)
        if S.ERASE == "free":
            b_g = tl.load(p_g + 3 * S.BT * S.BT, mask=m_g, other=0.0)
            b_rows = product(b_g, b_write2, b_rows, S.PRECISION)
            b_columns2 = product(tl.trans(b_g), b_read, b_columns2, S.PRECISION)
            b_dy2 += b_early * b_columns2
        b_dx2 += b_late2 * b_rows
    b_dy += b_early * b_columns
    return b_dx, b_dx2, b_dy, b_dy2


@triton.jit
def level_mask(BT: tl.constexpr, LEVEL: tl.constexpr):
    """The pairs of a level; of the last level all pairs."""
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    m_g = (o_i < BT) & (o_j < BT)
    if LEVEL == 0:
        m_g = o_i // BLOCK == o_j // BLOCK
    if LEVEL == 1:
        m_g = (o_i // 32 == o_j // 32) & (o_i // BLOCK != o_j // BLOCK)
    return m_g


@triton.jit
def operand(b_x, low: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product takes it: in bfloat16, or float32 with as many digits as count."""
    return rounded(b_x, PRECISION).to(low) if low == tl.float32 else b_x.to(low)


@triton.jit
def product(b_g, b_x, b_sum, PRECISION: tl.constexpr):
    """b_sum + G x, with x as two numbers of the type of G.

    The gradient by the decays is what x . dx and y . dy do not share: G may be rounded, which both
    see, but not what it is multiplied by.
    """
    b_high = operand(b_x, b_g.dtype, PRECISION)
    b_sum = tl.dot(b_g, b_high, acc=b_sum, input_precision=PRECISION)
    if PRECISION != "tf32x3":
        b_low = operand(b_x - b_high.to(tl.float32), b_g.dtype, PRECISION)
        b_sum = tl.dot(b_g, b_low, acc=b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def near_gradients(
    p_g, b_x, b_y, b_dx, b_dy, b_decay, m_steep, BT: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    """The same pair by pair in the blocks on the diagonal, for the steep columns of y."""
    BLOCKS: tl.constexpr = BT // BLOCK
    C: tl.constexpr = b_x.shape[1]
    o_i = tl.arange(0, BLOCK)[None, :, None]
    o_row = tl.arange(0, BT)
    o_row = tl.reshape(o_row, (BLOCKS, BLOCK))
    b_x = tl.reshape(b_x, (BLOCKS, BLOCK, C))
    b_y = tl.reshape(tl.where(m_steep, b_y, 0.0), (BLOCKS, BLOCK, C))
    b_decay = tl.reshape(b_decay, (BLOCKS, BLOCK, C))
    b_rows = tl.zeros([BLOCKS, BLOCK, C], tl.float32)
    b_columns = tl.zeros([BLOCKS, BLOCK, C], tl.float32)
    b_sum = tl.zeros([BLOCKS, BLOCK, C], tl.float32)
    for i_up in range(BLOCK):
        # The sums after row j gain row j + 1 as j goes up the block.
        j = BLOCK - 1 - i_up
        last = o_i if OWN else o_i - 1
        b_next = tl.sum(tl.where(o_i == j + 1, b_decay, 0.0), axis=1)[:, None, :]
        b_sum += tl.where(last > j, b_next, 0.0)
        b_g = tl.load(p_g + o_row * BT + o_row // BLOCK * BLOCK + j).to(tl.float32)
        b_pair = b_g[:, :, None] * tl.exp2(b_sum)
        b_rows += b_pair * tl.sum(tl.where(o_i == j, b_y, 0.0), axis=1)[:, None, :]
        b_column = tl.sum(b_pair * b_x, axis=1)[:, None, :]
        b_columns = tl.where(o_i == j, b_column, b_columns)
    b_dy += tl.where(m_steep, tl.reshape(b_columns, (BT, C)), 0.0)
    return b_dx + tl.reshape(b_rows, (BT, C)), b_dy


@triton.jit
def whole_gradients(p_g, e, b_dx, b_dx2, b_dy, b_dy2, S: tl.constexpr):
    """Add all pairs of a free erase at once: there is no decay."""
    p_g += tl.arange(0, S.BT)[:, None] * S.BT + tl.arange(0, S.BT)[None, :]
    b_g = tl.load(p_g)
    b_dx = product(b_g, e.b_y, b_dx, S.PRECISION)
    b_dy = product(tl.trans(b_g), e.b_x, b_dy, S.PRECISION)
    b_g = tl.load(p_g + S.BT * S.BT)
    b_dx2 = product(b_g, e.b_y, b_dx2, S.PRECISION)
    b_dy = product(tl.trans(b_g), e.b_x2, b_dy, S.PRECISION)
    b_g = tl.load(p_g + 2 * S.BT * S.BT)
    b_dx = product(b_g, e.b_y2, b_dx, S.PRECISION)
    b_dy2 = product(tl.trans(b_g), e.b_x, b_dy2, S.PRECISION)
    b_g = tl.load(p_g + 3 * S.BT * S.BT)
    b_dx2 = product(b_g, e.b_y2, b_dx2, S.PRECISION)
    b_dy2 = product(tl.trans(b_g), e.b_x2, b_dy2, S.PRECISION)
    return b_dx, b_dx2, b_dy, b_dy2


@triton.jit
def steep_gradients(p_g, p_s, e, b_g, b_dx, b_dx2, b_dy, b_dy2, o_r, o_k, S: tl.constexpr):
    """Add the pairs that no level has: the columns below the bar, against their own block."""
    OWN: tl.constexpr = S.ERASE != "free"
    m_y = load_sums(p_s, o_r, o_k, S.K) < -S.BAR
    SIZE: tl.constexpr = S.BT * S.BT
    b_dx, b_dy = near_gradients(p_g, e.b_x, e.b_y, b_dx, b_dy, b_g, m_y, S.BT, True)
    if S.ERASE != "none":
        p_g += SIZE
        b_dx2, b_dy = near_gradients(p_g, e.b_x2, e.b_y, b_dx2, b_dy, b_g, m_y, S.BT, OWN)
    if S.ERASE == "free":
        b_dx, b_dy2 = near_gradients(p_g + SIZE, e.b_x, e.b_y2, b_dx, b_dy2, b_g, m_y, S.BT, True)
        p_g += 2 * SIZE
        b_dx2, b_dy2 = near_gradients(p_g, e.b_x2, e.b_y2, b_dx2, b_dy2, b_g, m_y, S.BT, OWN)
    return b_dx, b_dx2, b_dy, b_dy2
