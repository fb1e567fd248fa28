"""Sums over rows and pairs of rows that the gradient by a decay is made of: device functions."""

import triton
import triton.language as tl


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
def pairs_across(b_z, o_t, o_i, o_j, PRECISION: tl.constexpr):
    """Of pairs of rows i and columns j the sum of those with i >= t > j, for every t of o_t.

    In 16 bits as the rows from t on less the columns from t on: pairs within cancel to float32.
    """
    if PRECISION == "tf32x3":
        later = (o_i[None, :] >= o_t[:, None]).to(tl.float32)
        b_later = tl.dot(later, b_z, input_precision=PRECISION)
        b_sum = tl.sum(tl.where(o_j[None, :] < o_t[:, None], b_later, 0.0), axis=1)
    else:
        b_rows, b_columns = tl.sum(b_z, axis=1)[None, :], tl.sum(b_z, axis=0)[None, :]
        b_sum = tl.sum(tl.where(o_i[None, :] >= o_t[:, None], b_rows, 0.0), axis=1)
        b_sum -= tl.sum(tl.where(o_j[None, :] >= o_t[:, None], b_columns, 0.0), axis=1)
    return b_sum
