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

    From the inverses of blocks of s rows to those of 2 s, which is substitution in another order.
    With R_s the inverse of the blocks on the diagonal of A = I + M Diag(beta), and N_s = -R_s M,

        [[A1, 0], [A21, A2]]^-1 = [[R1, 0], [-R2 A21 R1, R2]]
        N_2s = N_s + (N_s Diag(beta))_21 N_s          N_1 = -M

    Blocks of 16 rows are found first, each in one warp, which waits for no other: N_16 on the
    diagonal, where N_16 Diag(beta) = R_16 - I. float16 serves where inputs have fewer digits.
    """
    b_x = block_corrections(blocks_on_diagonal(b_m, BT), b_beta, PRECISION)
    b_x = repeated_blocks(b_x, BT)
    difference = tl.arange(0, BT)[:, None] ^ tl.arange(0, BT)[None, :]
    # Zeros, in the registers in which b_m lies: so the blocks need no way through memory.
    b_zeros = tl.where(difference < BT, 0.0, b_m)
    b_n = tl.where(difference < 16, b_x, b_m)
    b_x = tl.where(difference < 16, b_x * b_beta[None, :], b_zeros)
    b_n = times(b_x, tl.where(difference < 16, 0.0, b_m), b_n, PRECISION)
    for level in tl.static_range(4, 7):
        if 1 << level < BT:
            b_factor = tl.where(difference >> level == 1, b_beta[None, :], 0.0)
            b_n = times(b_n * b_factor, b_n, b_n, PRECISION)
    return b_n


@triton.jit
def block_corrections(b_n, b_beta, PRECISION: tl.constexpr):
    """N of each block of b_n [blocks, 16, 16], which holds -M."""
    difference = (tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :])[None]
    b_beta = tl.reshape(b_beta, [b_beta.shape[0] // 16, 1, 16])
    for level in tl.static_range(4):
        b_factor = tl.where(difference >> level == 1, b_beta, 0.0)
        b_n = times(b_n * b_factor, b_n, b_n, PRECISION)
    return b_n


@triton.jit
def blocks_on_diagonal(b_x, BT: tl.constexpr):
    """The blocks [BT / 16, 16, 16] on the diagonal of b_x [BT, BT]."""
    o_b = tl.arange(0, BT // 16)
    same = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    b_x = tl.reshape(b_x, [BT // 16, 16, BT // 16, 16])
    return tl.sum(tl.where(same, b_x, 0.0), axis=2)


@triton.jit
def repeated_blocks(b_x, BT: tl.constexpr):
    """The matrix [BT, BT] whose rows of 16 repeat a block of b_x [BT / 16, 16, 16]."""
    b_x = tl.broadcast_to(b_x[:, :, None, :], [BT // 16, 16, BT // 16, 16])
    return tl.reshape(b_x, [BT, BT])


@triton.jit
def times(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """b_x b_y + b_sum, the factors in float16 unless full precision is asked for."""
    if PRECISION != "tf32x3":
        b_x, b_y = b_x.to(tl.float16), b_y.to(tl.float16)
    return tl.dot(b_x, b_y, acc=b_sum, input_precision=PRECISION)
