"""The sigmoid inside of kernels."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x), in float32: a division is ten instructions where a root is one."""
    b_root = tl.rsqrt(1 + tl.exp2(b_x * -LOG2_E))
    return b_root * b_root
