"""The gradient by decays per channel, once everything else of a chunk is known: device functions.

A decay reaches every pair around it. With z_i = sum x_i dx_i - sum y_i dy_i, and what reaches the
end of the chunk, sum_j y_j decay(j, end] D^T (..)_j + decay[0, end] sum_v D S, all per channel,

    dlog_decay_t = sum of z over the rows from token t to the chunk's end, and what reaches it

A free erase leaves its own row's decay out: its x_i dx_i is in z, and taken from row i again.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.channel_decay import BLOCK, GONE, channel_log_decay, load_sums

# Rows of a chunk's sums that the backward uses anew: z, and below them
BOTH, LAST_ROWS, OWN_ROWS = tl.constexpr(81), tl.constexpr(84), tl.constexpr(148)


@triton.jit
def store_rows(p_s, b_x, o_r, o_k, K: tl.constexpr):
    """Write rows into a chunk's sums."""
    tl.store(p_s + o_r[:, None] * K + o_k[None, :], b_x, mask=(o_k < K)[None, :])


@triton.jit
def decay_gradients(
    p_s, p_g, p_c, p_dg, rows, s_decay_t, s_decay_k, HV: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, N_STEPS: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """dlog_decay of a chunk, row after row of four blocks at once, from what replaced the sums."""
    o_k, o_b = tl.arange(0, BK), tl.arange(0, 4) * BLOCK
    m_k = o_k < K
    b_last = tl.zeros([4, BK], tl.float32)
    b_z = tl.zeros([4, BK], tl.float32)
    for row in tl.static_range(BLOCK):
        b_z += load_sums(p_s, o_b + row, o_k, K)
        b_last += load_sums(p_s + LAST_ROWS * K, o_b + row, o_k, K)
    # Every decay of the chunk takes part in what reaches its end.
    b_end = tl.load(p_s + BOTH * K + o_k, mask=m_k, other=0.0)
    b_end = tl.sum(b_last, axis=0) + b_end * tl.load(p_c + o_k, mask=m_k, other=0.0)
    b_sum = tl.cumsum(b_z, axis=0, reverse=True) - b_z + b_end[None, :]
    for up in tl.static_range(0, BLOCK, 4):
        # Loads first: they wait for memory together.
        b_0 = load_sums(p_s, o_b + BLOCK - 1 - up, o_k, K)
        b_1 = load_sums(p_s, o_b + BLOCK - 2 - up, o_k, K)
        b_2 = load_sums(p_s, o_b + BLOCK - 3 - up, o_k, K)
        b_3 = load_sums(p_s, o_b + BLOCK - 4 - up, o_k, K)
        b_1 += b_0
        b_2 += b_1
        b_3 += b_2
        for step in tl.static_range(4):
            o_r = o_b + BLOCK - 1 - up - step
            b_row = b_sum + (b_0 if step == 0 else b_1 if step == 1 else b_2 if step == 2 else b_3)
            if FREE:
                b_row -= load_sums(p_s + OWN_ROWS * K, o_r, o_k, K)
            b_g = channel_log_decay(p_g, o_r, rows, o_k, s_decay_t, s_decay_k, K, N_STEPS)
            m_r = (o_r < rows) & (o_r % N_STEPS == 0)
            p_r = p_dg + (o_r // N_STEPS)[:, None] * (HV * K) + o_k[None, :]
            tl.store(p_r, tl.where(b_g == GONE, 0.0, b_row), mask=m_r[:, None] & m_k[None, :])
        b_sum += b_3
