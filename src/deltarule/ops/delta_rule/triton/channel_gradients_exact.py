"""The gradients of a chunk from the states around it, all chunks at once; decay per channel.

S is the state at the chunk's start, D the gradient by the state at its end, E the prediction errors
(free: what is written along b), X the gradient by F / beta (by w). A first kernel leaves the
gradients by the scores of every pair, a second one takes them through the decays e = decay(j, i]:

                pairs G_ij                               rows x    columns y     D^T
    none        scale dO_i . v_j                         q         k             v_j
    tied        scale dO_i . w_j,  -beta_i X_i . w_j     q, k      k             w_j = beta_j E_j
    free        scale dO_i . E_j,  scale dO_i . v_j      q         b, k          E_j, v_j
                X_i . E_j,  X_i . v_j                    a         b, k          (decay(j, i))

    dx_i = decay[0, i] S^T (scale dO_i, -beta_i X_i or X_i) + sum_j G_ij e_ij y_j
    dy_j = decay(j, end] D^T (..) + sum_i G_ij e_ij x_i

    dlog_decay_t = sum of z over the rows from token t to the chunk's end, and what reaches it,
                   sum_j y_j decay(j, end] D^T (..)_j + decay[0, end] sum_v D S

`pair_gradients_kernel` has the pairs G, `exact_gradients_kernel` the sums over them; of unit
norms `unit_norm_gradients_kernel` does the rest. A program takes one chunk of one key head and adds
up its value heads in order.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton import channel_decay as decay
from deltarule.ops.delta_rule.triton import channel_tiles as channels
from deltarule.ops.delta_rule.triton.channel_decay import (
    AFTER,
    BEFORE,
    BLOCK,
    EARLY,
    GONE,
    LATE,
    LEAST,
    ROWS,
)
from deltarule.ops.delta_rule.triton.tiles import load_chunk, load_rows, store_rows

# What the gradients of pairs and the decays left, where gradients go, and the scale.
Given = namedtuple("Given", "pairs sums chunk_decay d_q d_k d_a d_b d_log_decay scale")


# Sums over the pairs of rows of a chunk, level by level, with the factors of channel_decay.py; what
# lies below the bar pair by pair. With G_ij the gradient by a score and e_ij its decay,
#
#     dx_i + sum_j G_ij e_ij y_j        dy_j + sum_i G_ij e_ij x_i
#
# A decay reaches every pair around it, so its gradient is made of
#
#     z_i = sum x_i dx_i - sum y_i dy_i
#
# in which the pairs between later rows cancel: both sides of z take the same rounded x and y.


# The rows x and x2 and the columns y and y2 of a chunk, for some channels.
Sides = namedtuple("Sides", "b_x b_x2 b_y b_y2")


# z without the rows of a free erase, z of these, and gradients by what `Sides` has.
Sums = namedtuple("Sums", "b_z b_own b_dx b_dx2 b_dy b_dy2")


@triton.jit
def operand(b_x, low: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product with gradients by scores takes it: in bfloat16, or the digits of tf32."""
    return decay.rounded(b_x, PRECISION).to(low) if low == tl.float32 else b_x.to(low)


@triton.jit
def level_gradients(p_g, p_s, e, d, o_r, o_k, LEVEL: tl.constexpr, S: tl.constexpr):
    """Add the pairs of one level, 0 in a block, 1 in a pair of blocks, 2 beyond:

    dx_i + late_i sum_j G_ij early_j y_j        dy_j + early_j sum_i G_ij late_i x_i
    """
    FREE: tl.constexpr = S.ERASE == "free"
    SIZE: tl.constexpr = S.BT * S.BT
    low: tl.constexpr = p_g.dtype.element_ty
    b_z, b_own, b_dx, b_dx2, b_dy, b_dy2 = d
    o_i, o_j = tl.arange(0, S.BT)[:, None], tl.arange(0, S.BT)[None, :]
    m_block, m_both = o_i // BLOCK == o_j // BLOCK, o_i // 32 == o_j // 32
    # Of the last level all pairs.
    m_g = m_block if LEVEL == 0 else m_both & ~m_block if LEVEL == 1 else m_block | ~m_block
    p_g += tl.arange(0, S.BT)[:, None] * S.BT + tl.arange(0, S.BT)[None, :]
    b_lead = decay.load_sums(p_s, o_r, o_k, S.K)
    b_late = tl.exp2(b_lead)
    if LEVEL == 0:
        b_early = decay.near_decay(b_lead, S.BAR)
    else:
        b_early = decay.tail_decay(p_s, b_lead, o_r, o_k, S.K, S.EXACT)
    if LEVEL == 2:
        # Both are 0 wherever they do not belong, so that all of G may meet them.
        b_early *= decay.of_block(p_s, EARLY, o_r, o_k, S.K)
        b_late *= decay.of_block(p_s, LATE, o_r, o_k, S.K)
    b_read = operand(e.b_x * b_late, low, S.PRECISION)
    b_write = operand(e.b_y * b_early, low, S.PRECISION)
    b_g = tl.load(p_g, mask=m_g, other=0.0)
    b_rows = tl.dot(b_g, b_write, input_precision=S.PRECISION)
    b_columns = tl.dot(tl.trans(b_g), b_read, input_precision=S.PRECISION)
    if FREE:
        b_write2 = operand(e.b_y2 * b_early, low, S.PRECISION)
        b_g = tl.load(p_g + 2 * SIZE, mask=m_g, other=0.0)
        b_rows = tl.dot(b_g, b_write2, acc=b_rows, input_precision=S.PRECISION)
        b_columns2 = tl.dot(tl.trans(b_g), b_read, input_precision=S.PRECISION)
    b_dx += b_late * b_rows
    b_z += b_read.to(tl.float32) * b_rows
    if S.ERASE != "none":
        if FREE:
            b_late = decay.lead_decay(p_s, o_r, o_k, S.K, False)
            if LEVEL == 2:
                b_late *= decay.of_block(p_s, LATE, o_r, o_k, S.K)
        b_read = operand(e.b_x2 * b_late, low, S.PRECISION)
        b_g = tl.load(p_g + SIZE, mask=m_g, other=0.0)
        b_rows = tl.dot(b_g, b_write, input_precision=S.PRECISION)
        b_columns = tl.dot(tl.trans(b_g), b_read, acc=b_columns, input_precision=S.PRECISION)
        if FREE:
            b_g = tl.load(p_g + 3 * SIZE, mask=m_g, other=0.0)
            b_rows = tl.dot(b_g, b_write2, acc=b_rows, input_precision=S.PRECISION)
            b_columns2 = tl.dot(tl.trans(b_g), b_read, acc=b_columns2, input_precision=S.PRECISION)
            b_dy2 += b_early * b_columns2
            b_z -= b_write2.to(tl.float32) * b_columns2
        b_dx2 += b_late * b_rows
        b_own += b_read.to(tl.float32) * b_rows
    b_dy += b_early * b_columns
    b_z -= b_write.to(tl.float32) * b_columns
    return Sums(b_z, b_own, b_dx, b_dx2, b_dy, b_dy2)


@triton.jit
def near_gradients(p_g, b_x, b_y, b_decay, BT: tl.constexpr, OWN: tl.constexpr):
    """sum_j G_ij e_ij y_j and sum_i G_ij e_ij x_i, pair by pair, in the blocks on the diagonal."""
    BLOCKS: tl.constexpr = BT // BLOCK
    C: tl.constexpr = b_x.shape[1]
    o_i = tl.arange(0, BLOCK)[None, :, None]
    o_row = tl.reshape(tl.arange(0, BT), (BLOCKS, BLOCK))
    b_x = tl.reshape(b_x, (BLOCKS, BLOCK, C))
    b_y = tl.reshape(b_y, (BLOCKS, BLOCK, C))
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
    return tl.reshape(b_rows, (BT, C)), tl.reshape(b_columns, (BT, C))


@triton.jit
def gradients_below_bar(p_g, p_s, e, d, b_g, o_r, o_k, S: tl.constexpr):
    """Add the pairs that no level has: the columns below the bar, against their own block."""
    FREE: tl.constexpr = S.ERASE == "free"
    SIZE: tl.constexpr = S.BT * S.BT
    b_z, b_own, b_dx, b_dx2, b_dy, b_dy2 = d
    m_y = decay.load_sums(p_s, o_r, o_k, S.K) < -S.BAR
    b_y = tl.where(m_y, e.b_y, 0.0)
    b_rows, b_columns = near_gradients(p_g, e.b_x, b_y, b_g, S.BT, True)
    if S.ERASE != "none":
        b_rows2, b_more = near_gradients(p_g + SIZE, e.b_x2, b_y, b_g, S.BT, not FREE)
        b_columns += b_more
    b_columns = tl.where(m_y, b_columns, 0.0)
    b_dy += b_columns
    b_z -= b_y * b_columns
    if FREE:
        b_y = tl.where(m_y, e.b_y2, 0.0)
        b_more, b_columns = near_gradients(p_g + 2 * SIZE, e.b_x, b_y, b_g, S.BT, True)
        b_rows += b_more
        b_more, b_columns2 = near_gradients(p_g + 3 * SIZE, e.b_x2, b_y, b_g, S.BT, False)
        b_rows2 += b_more
        b_columns = tl.where(m_y, b_columns + b_columns2, 0.0)
        b_dy2 += b_columns
        b_z -= b_y * b_columns
    b_dx += b_rows
    b_z += e.b_x * b_rows
    if S.ERASE != "none":
        b_dx2 += b_rows2
        b_own += e.b_x2 * b_rows2
    return Sums(b_z, b_own, b_dx, b_dx2, b_dy, b_dy2)


@triton.jit
def gradients_without_decay(p_g, e, d, S: tl.constexpr):
    """Add all pairs of a free erase at once."""
    SIZE: tl.constexpr = S.BT * S.BT
    low: tl.constexpr = p_g.dtype.element_ty
    b_x, b_x2 = operand(e.b_x, low, S.PRECISION), operand(e.b_x2, low, S.PRECISION)
    b_y, b_y2 = operand(e.b_y, low, S.PRECISION), operand(e.b_y2, low, S.PRECISION)
    p_g += tl.arange(0, S.BT)[:, None] * S.BT + tl.arange(0, S.BT)[None, :]
    b_g = tl.load(p_g)
    b_dx = tl.dot(b_g, b_y, acc=d.b_dx, input_precision=S.PRECISION)
    b_dy = tl.dot(tl.trans(b_g), b_x, acc=d.b_dy, input_precision=S.PRECISION)
    b_g = tl.load(p_g + SIZE)
    b_dx2 = tl.dot(b_g, b_y, acc=d.b_dx2, input_precision=S.PRECISION)
    b_dy = tl.dot(tl.trans(b_g), b_x2, acc=b_dy, input_precision=S.PRECISION)
    b_g = tl.load(p_g + 2 * SIZE)
    b_dx = tl.dot(b_g, b_y2, acc=b_dx, input_precision=S.PRECISION)
    b_dy2 = tl.dot(tl.trans(b_g), b_x, acc=d.b_dy2, input_precision=S.PRECISION)
    b_g = tl.load(p_g + 3 * SIZE)
    b_dx2 = tl.dot(b_g, b_y2, acc=b_dx2, input_precision=S.PRECISION)
    b_dy2 = tl.dot(tl.trans(b_g), b_x2, acc=b_dy2, input_precision=S.PRECISION)
    return Sums(d.b_z, d.b_own, b_dx, b_dx2, b_dy, b_dy2)


# The gradients by the scores of every pair of rows in a chunk, before any decay.
#
#     none    scale dO_i . v_j                            for the rows j up to row i
#     tied    scale dO_i . w_j and, of rows before i, -beta_i X_i . w_j        w_j = beta_j E_j
#     free    scale dO_i . E_j, scale dO_i . v_j and, of rows before i, X_i . E_j, X_i . v_j
#
# They are kept in the order q against k; k against k; or q against b, a against b, q against k, a
# against k. The gradients by v and beta need no more than what is at hand here.


@triton.jit
def pairs_of_chunk(
    i_m, i_h, first, rows, x, g, d_values, pairs, d_v, d_beta, scale, S: tl.constexpr
):
    i_slot = i_m.to(tl.int64) * S.HV + i_h
    o_r = tl.arange(0, S.BT)
    o_i, o_j, m_r = o_r[:, None], o_r[None, :], o_r < rows
    m_q = m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    WHOLE: tl.constexpr = S.V % S.BV == 0
    p_do = x.d_o + (first * S.HV + i_h) * S.V
    row_v = (first * S.N_STEPS * S.HV + i_h) * S.V
    b_beta = tl.full([S.BT], 1.0, tl.float32)
    if S.ERASE == "tied":
        b_beta = channels.load_beta(g, first, i_h, o_r, m_r, S)
    b_g, b_g2 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    b_g3, b_g4 = tl.zeros([S.BT, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    b_dbeta = tl.zeros([S.BT], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_do = load_rows(p_do, o_r // S.N_STEPS, m_q, o_v, S.V, S.HV * S.V, WHOLE)
        b_x = load_chunk(x.d_errors, i_slot, i_v, S.V, S.BT, S.BV, False)
        if S.ERASE == "none":
            b_e = load_rows(x.v + row_v, o_r, m_r, o_v, S.V, S.HV * S.V, WHOLE)
        else:
            b_e = load_chunk(x.errors, i_slot, i_v, S.V, S.BT, S.BV, False)
            b_g2 = tl.dot(b_x, tl.trans(b_e), acc=b_g2, input_precision=S.PRECISION)
        b_g = tl.dot(b_do, tl.trans(b_e), acc=b_g, input_precision=S.PRECISION)
        b_dv = b_x
        if S.ERASE == "tied":
            b_dbeta += tl.sum(b_e.to(tl.float32) * b_x.to(tl.float32), axis=1)
            b_dv = b_x.to(tl.float32) * b_beta[:, None]
        if S.ERASE == "free":
            b_v = load_rows(x.v + row_v, o_r, m_r, o_v, S.V, S.HV * S.V, WHOLE)
            b_g3 = tl.dot(b_do, tl.trans(b_v), acc=b_g3, input_precision=S.PRECISION)
            b_g4 = tl.dot(b_x, tl.trans(b_v), acc=b_g4, input_precision=S.PRECISION)
            b_dv = load_chunk(d_values, i_slot, i_v, S.V, S.BT, S.BV, False)
        store_rows(d_v + row_v, b_dv, o_r, m_r, o_v, S.V, S.HV * S.V)
    COUNT: tl.constexpr = 1 if S.ERASE == "none" else 2 if S.ERASE == "tied" else 4
    low: tl.constexpr = pairs.dtype.element_ty
    p_g = pairs + i_slot * COUNT * S.BT * S.BT + o_i * S.BT + o_j
    b_g = tl.where(o_j <= o_i, b_g * scale * b_beta[None, :], 0.0)
    tl.store(p_g, operand(b_g, low, S.PRECISION))
    if S.ERASE == "tied":
        b_g2 *= -b_beta[:, None] * b_beta[None, :]
        p_dbeta = d_beta + (first * S.N_STEPS + o_r) * S.HV + i_h
        tl.store(p_dbeta, b_dbeta, mask=m_r)
    if S.ERASE != "none":
        b_g2 = tl.where(o_j < o_i, b_g2, 0.0)
        tl.store(p_g + S.BT * S.BT, operand(b_g2, low, S.PRECISION))
    if S.ERASE == "free":
        b_g3, b_g4 = tl.where(o_j <= o_i, b_g3 * scale, 0.0), tl.where(o_j < o_i, b_g4, 0.0)
        tl.store(p_g + 2 * S.BT * S.BT, operand(b_g3, low, S.PRECISION))
        tl.store(p_g + 3 * S.BT * S.BT, operand(b_g4, low, S.PRECISION))


@triton.jit
def state_gradients(x, i_slot, first, i_h, o_r, m_r, o_k, S: tl.constexpr):
    """S^T dO, S^T X, D^T E and D^T v of the channels o_k, and D S not yet summed over v."""
    m_q = m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    WHOLE: tl.constexpr = S.V % S.BV == 0
    p_do, row_v = x.d_o + (first * S.HV + i_h) * S.V, (first * S.N_STEPS * S.HV + i_h) * S.V
    b_q, b_x = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    b_e, b_v = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    b_both = tl.zeros([S.BV, S.BC], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        m_s = (o_v < S.V)[:, None] & (o_k < S.K)[None, :]
        o_s = i_slot * S.V * S.K + o_v[:, None] * S.K + o_k[None, :]
        b_s = tl.load(x.states + o_s, mask=m_s, other=0.0)
        b_d = tl.load(x.d_states + o_s, mask=m_s, other=0.0)
        b_both += b_s.to(tl.float32) * b_d.to(tl.float32)
        b_do = load_rows(p_do, o_r // S.N_STEPS, m_q, o_v, S.V, S.HV * S.V, WHOLE)
        b_q = tl.dot(b_do, b_s, acc=b_q, input_precision=S.PRECISION)
        if S.ERASE != "none":
            b_row = load_chunk(x.d_errors, i_slot, i_v, S.V, S.BT, S.BV, False)
            b_x = tl.dot(b_row, b_s, acc=b_x, input_precision=S.PRECISION)
            b_row = load_chunk(x.errors, i_slot, i_v, S.V, S.BT, S.BV, False)
            b_e = tl.dot(b_row, b_d, acc=b_e, input_precision=S.PRECISION)
        if S.ERASE != "tied":
            b_row = load_rows(x.v + row_v, o_r, m_r, o_v, S.V, S.HV * S.V, WHOLE)
            b_v = tl.dot(b_row, b_d, acc=b_v, input_precision=S.PRECISION)
    return b_q, b_x, b_e, b_v, b_both


@triton.jit
def channel_tile(i, x, y, g, norms, i_m, i_key, i_k, first, rows, below_bar, S: tl.constexpr):
    FREE: tl.constexpr = S.ERASE == "free"
    COUNT: tl.constexpr = 4 if FREE else 2 if S.ERASE == "tied" else 1
    o_r, o_k = tl.arange(0, S.BT), i_k + tl.arange(0, S.BC)
    m_r, m_k = o_r < rows, (o_k < S.K)[None, :]
    o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    row_q, row_k = (first * S.H + i_key) * S.K, (first * S.N_STEPS * S.H + i_key) * S.K
    b_q = channels.load_channels(i.q + row_q, o_t, m_q, o_k, S.H * S.K, S.K) * norms[0]
    b_k = channels.load_channels(i.k + row_k, o_r, m_r, o_k, S.H * S.K, S.K) * norms[1]
    b_dq, b_dk = tl.zeros([S.BT, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    for i_g in range(S.HV // S.H):
        i_h = i_key * (S.HV // S.H) + i_g
        i_slot, row_a = i_m.to(tl.int64) * S.HV + i_h, (first * S.HV + i_h) * S.K
        b_x, b_y = b_k, b_k
        if FREE:
            b_x = channels.load_channels(i.a + row_a, o_r, m_r, o_k, S.HV * S.K, S.K)
            b_y = channels.load_channels(i.b + row_a, o_r, m_r, o_k, S.HV * S.K, S.K)
        e = Sides(b_q, b_x, b_y, b_k)
        b_dqh, b_row, b_col, b_colk, b_both = state_gradients(
            x, i_slot, first, i_h, o_r, m_r, o_k, S
        )
        b_dqh *= y.scale
        if S.ERASE == "tied":
            b_beta = channels.load_beta(g, first, i_h, o_r, m_r, S)
            b_row *= -b_beta[:, None]
            b_col *= b_beta[:, None]
        if S.ERASE == "none":
            b_col = b_colk
        p_p = y.pairs + i_slot * COUNT * S.BT * S.BT
        if S.HAS_DECAY:
            p_s = y.sums + i_slot * ROWS * S.K
            b_start = decay.of_block(p_s, BEFORE, o_r, o_k, S.K)
            b_dqh *= decay.lead_decay(p_s, o_r, o_k, S.K, True) * b_start
            b_row *= decay.lead_decay(p_s, o_r, o_k, S.K, not FREE) * b_start
            b_lead = decay.load_sums(p_s, o_r, o_k, S.K)
            b_end = decay.tail_decay(p_s, b_lead, o_r, o_k, S.K, S.EXACT)
            b_end *= decay.of_block(p_s, AFTER, o_r, o_k, S.K)
            b_col *= b_end
            b_all = tl.load(y.chunk_decay + i_slot * S.K + o_k, mask=o_k < S.K, other=0.0)
            b_last = b_y * b_col
            if FREE:
                b_colk *= b_end
                b_last += b_k * b_colk
            # Every decay of the chunk takes part in what reaches its end.
            b_through = tl.sum(b_last, axis=0) + tl.sum(b_both, axis=0) * b_all
            d = Sums(b_q * b_dqh - b_last, b_x * b_row, b_dqh, b_row, b_col, b_colk)
            for level in tl.static_range(3):
                d = level_gradients(p_p, p_s, e, d, o_r, o_k, level, S)
            b_g = decay.channel_log_decay(decay.decays_of(g, first, i_h), o_r, rows, o_k, g, S)
            if below_bar:
                d = gradients_below_bar(p_p, p_s, e, d, b_g, o_r, o_k, S)
            b_z, b_own, b_dqh, b_row, b_col, b_colk = d
            b_z = tl.cumsum(b_z + b_own, axis=0, reverse=True) + b_through[None, :]
            if FREE:
                # The row's own decay is in none of its pairs.
                b_z -= b_own
            p_d = (first * S.HV + i_h) * S.K + o_t[:, None] * (S.HV * S.K) + o_k[None, :]
            m_d = (m_r & (o_r % S.N_STEPS == 0))[:, None] & m_k
            tl.store(y.d_log_decay + p_d, tl.where(b_g == GONE, 0.0, b_z), mask=m_d)
        else:
            d = gradients_without_decay(p_p, e, Sums(0, 0, b_dqh, b_row, b_col, b_colk), S)
            _, _, b_dqh, b_row, b_col, b_colk = d
        b_dq += b_dqh
        if FREE:
            p_d = row_a + o_r[:, None] * (S.HV * S.K) + o_k[None, :]
            tl.store(y.d_a + p_d, b_row.to(y.d_a.dtype.element_ty), mask=m_r[:, None] & m_k)
            tl.store(y.d_b + p_d, b_col.to(y.d_b.dtype.element_ty), mask=m_r[:, None] & m_k)
            b_dk += b_colk
        else:
            b_dk += b_row + b_col if S.ERASE == "tied" else b_col
    b_dq, b_dk = b_dq * norms[0], b_dk * norms[1]
    p_d = row_q + o_t[:, None] * (S.H * S.K) + o_k[None, :]
    tl.store(y.d_q + p_d, b_dq.to(y.d_q.dtype.element_ty), mask=m_q[:, None] & m_k)
    p_d = row_k + o_r[:, None] * (S.H * S.K) + o_k[None, :]
    tl.store(y.d_k + p_d, b_dk.to(y.d_k.dtype.element_ty), mask=m_r[:, None] & m_k)


@triton.jit
def gradients_of_chunk(i_m, i_key, first, rows, i, x, y, g, S: tl.constexpr):
    o_r = tl.arange(0, S.BT)
    m_r = o_r < rows
    o_t, m_q = o_r // S.N_STEPS, m_r & (o_r % S.N_STEPS == S.N_STEPS - 1)
    row_q, row_k = (first * S.H + i_key) * S.K, (first * S.N_STEPS * S.H + i_key) * S.K
    norm_q = channels.inverse_norms(i.q + row_q, o_t, m_q, S)[:, None]
    norm_k = channels.inverse_norms(i.k + row_k, o_r, m_r, S)[:, None]
    norms, least = (norm_q, norm_k), 0.0
    if S.HAS_DECAY:
        for i_g in range(S.HV // S.H):
            i_slot = i_m.to(tl.int64) * S.HV + i_key * (S.HV // S.H) + i_g
            least = tl.minimum(least, tl.load(y.sums + (i_slot * ROWS + LEAST) * S.K))
    for i_k in range(0, S.K, S.BC):
        channel_tile(i, x, y, g, norms, i_m, i_key, i_k, first, rows, least < -S.BAR, S)
