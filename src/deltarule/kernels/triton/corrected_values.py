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
    """N [BT, BT] of a strictly lower triangular M, in float32.

    The inverse R of A = I + M Diag(beta) from that of its blocks of 1, 2, 4, ... rows, pair by
    pair, which is substitution in another order:

        [[A1, 0], [A21, A2]]^-1 = [[R1, 0], [-R2 A21 R1, R2]]

    Half precision serves for the inverse, whose entries are about one.
    """
    b_a = b_m * b_beta[None, :]
    difference = tl.arange(0, BT)[:, None] ^ tl.arange(0, BT)[None, :]
    b_r = tl.where(difference == 0, 1.0, tl.where(difference == 1, -b_a, 0.0))
    for level in tl.static_range(1, 7):
        if 1 << level < BT:
            b_x = product(b_a, b_r, None, PRECISION)
            b_x = tl.where(difference >> level == 1, -b_x, 0.0)
            b_r = product(b_r, b_x, b_r, PRECISION)
    return tl.dot(b_r, -b_m, input_precision=PRECISION)


@triton.jit
def product(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """b_sum + b_x b_y, in float16 unless full precision is asked for."""
    if PRECISION != "tf32x3":
        b_x, b_y = b_x.to(tl.float16), b_y.to(tl.float16)
    return tl.dot(b_x, b_y, acc=b_sum, input_precision=PRECISION)
