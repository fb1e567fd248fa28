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
def decay_ratio(whole_i, rest_i, whole_j, rest_j):
    """The decay after row j up to row i, for j <= i; 1 at most for any j."""
    return tl.exp2(tl.minimum((whole_i - whole_j) + (rest_i - rest_j), 0.0))
