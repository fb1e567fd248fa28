"""Products of decays inside a chunk, as powers of two of sums that never grow: device functions.

The sum of logs to base 2 up to row i is kept in two parts, the whole numbers and the rest:

    decay(j, i] = 2^((whole_i - whole_j) + (rest_i - rest_j))

Whole numbers add exactly, so that a strong decay, or a reset, costs the weaker ones after it no
digits. A log decay below -16384 counts as that: 64 of them still add exactly, and its power is zero
long before.
"""

import triton
import triton.language as tl

# A log decay below this leaves nothing of what was there.
RESET = tl.constexpr(-60.0)
LOWEST = tl.constexpr(-16384.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def decay_sums(b_g):
    """Running sums of natural log decays, to base 2: (whole, rest)."""
    b_g = tl.maximum(b_g * LOG2_E, LOWEST)
    whole = tl.floor(b_g + 0.5)
    return tl.cumsum(whole, axis=0), tl.cumsum(b_g - whole, axis=0)


@triton.jit
def row_decays(log_decay, o_r, tokens, stride, N_STEPS: tl.constexpr):
    """Log decays of the rows of a chunk, of which the first for each token decays."""
    m_decay = (o_r < tokens * N_STEPS) & (o_r % N_STEPS == 0)
    b_g = tl.load(log_decay + o_r // N_STEPS * stride, mask=m_decay, other=0.0)
    return b_g.to(tl.float32)


@triton.jit
def chunk_decay_sums(log_decay, o_r, o_i, tokens, stride, N_STEPS: tl.constexpr):
    """(whole, rest) up to each row of a chunk, and up to the last row of each token."""
    whole, rest = decay_sums(row_decays(log_decay, o_r, tokens, stride, N_STEPS))
    whole_q, rest_q = whole, rest
    if N_STEPS > 1:
        whole_q, rest_q = decay_sums(row_decays(log_decay, o_i, tokens, stride, 1))
    return whole, rest, whole_q, rest_q


@triton.jit
def decay_ratio(whole_i, rest_i, whole_j, rest_j):
    """The decay after row j up to row i, for j <= i; 1 at most for any j."""
    return tl.exp2(tl.minimum((whole_i - whole_j) + (rest_i - rest_j), 0.0))
