"""The inverse that corrects what a chunk's rows write: device functions.

With M_ij = decay(j, i] k_i . k_j for j < i, the prediction errors e of a chunk whose rows read F
from the state before it are

    E = (I + M Diag(beta))^-1 F = F + N Diag(beta) F          N = -(I + M Diag(beta))^-1 M

N is exact where beta is zero, serves the backward as it stands (X = Y + N^T Diag(beta) Y), and its
diagonal, which would be all ones in the inverse, is never rounded.
"""

import triton
import triton.language as tl


@triton.jit
def correction(b_m, b_beta, BT: tl.constexpr, PRECISION: tl.constexpr):
    """N [BT, BT] of a strictly lower triangular matrix b_m that holds -M, in float32.

    The inverse R of A = I + M Diag(beta) from that of its blocks of 1, 2, 4, ... rows, pair by
    pair, which is substitution in another order:

        [[A1, 0], [A21, A2]]^-1 = [[R1, 0], [-R2 A21 R1, R2]]

    float16 serves for the inverse, whose entries are about one, where inputs have fewer digits.
    """
    b_a = b_m * b_beta[None, :]
    difference = tl.arange(0, BT)[:, None] ^ tl.arange(0, BT)[None, :]
    b_r = tl.where(difference == 0, 1.0, tl.where(difference == 1, b_a, 0.0))
    b_a, b_m = operand(b_a, PRECISION), operand(b_m, PRECISION)
    for level in tl.static_range(1, 7):
        if 1 << level < BT:
            b_low = operand(b_r, PRECISION)
            b_x = tl.dot(b_a, b_low, input_precision=PRECISION)
            b_x = operand(tl.where(difference >> level == 1, b_x, 0.0), PRECISION)
            b_r = tl.dot(b_low, b_x, acc=b_r, input_precision=PRECISION)
    return tl.dot(operand(b_r, PRECISION), b_m, input_precision=PRECISION)


@triton.jit
def operand(b_x, PRECISION: tl.constexpr):
    """b_x in float16, unless full precision is asked for."""
    if PRECISION != "tf32x3":
        b_x = b_x.to(tl.float16)
    return b_x
