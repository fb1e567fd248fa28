"""1 / |q| and 1 / |k| of every token, for calls with `normalize_qk`."""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.tiles import inverse_norm


@triton.jit(do_not_specialize=["rows"])
def inverse_norms_kernel(
    q, k, norms, rows, HEADS: tl.constexpr, STEPS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """norms [B T H, 1 + n] of the rows of q [B, T, H, K] and of the n of k [B, T n, H, K]."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k, m_r = tl.arange(0, BK)[None, :], o_r < rows
    o_x, m_x = o_r[:, None] * K + o_k, m_r[:, None]
    if BK > K:
        m_x &= o_k < K
    b_q = tl.load(q + o_x, mask=m_x, other=0.0)
    for step in tl.static_range(STEPS):
        if STEPS > 1:
            row = (o_r // HEADS * STEPS + step) * HEADS + o_r % HEADS
            o_x = row[:, None] * K + o_k
        b_k = tl.load(k + o_x, mask=m_x, other=0.0)
        if step == 0:
            tl.store(norms + o_r * (1 + STEPS), inverse_norm(b_q), mask=m_r)
        tl.store(norms + o_r * (1 + STEPS) + (1 + step), inverse_norm(b_k), mask=m_r)
