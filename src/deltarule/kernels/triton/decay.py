"""Products of decays inside a chunk, as exponentials of sums that never grow: device functions.

The sum up to row i is kept in two parts, the whole numbers and the rest:

    decay(j, i] = exp((whole_i - whole_j) + (rest_i - rest_j))

Whole numbers add exactly, so that a strong decay, or a reset, costs the weaker ones after it no
digits. A log decay below -16384 counts as that: 64 of them still add exactly, and its exponential
is zero long before.
"""

import triton
import triton.language as tl

# A log decay below this leaves nothing of what was there.
RESET = tl.constexpr(-60.0)
LOWEST = tl.constexpr(-16384.0)


@triton.jit
def decay_sums(b_g, axis: tl.constexpr):
    """Running sums of log decays along an axis: (whole, rest)."""
    b_g = tl.maximum(b_g, LOWEST)
    whole = tl.floor(b_g + 0.5)
    return tl.cumsum(whole, axis=axis), tl.cumsum(b_g - whole, axis=axis)


@triton.jit
def decay_ratio(whole_i, rest_i, whole_j, rest_j):
    """The decay after row j up to row i, for j <= i; 1 at most for any j."""
    return tl.exp(tl.minimum((whole_i - whole_j) + (rest_i - rest_j), 0.0))
