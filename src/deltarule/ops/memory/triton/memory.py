"""What the kernels of a memory share: tiles of a mini-batch, the loss and its derivatives.

Rows are the tokens of a mini-batch, T of them in BT. Everything is in float32, and products are
sums of three in tf32.
"""

from collections import namedtuple

import triton
import triton.language as tl

PRECISION = tl.constexpr("tf32x3")
# A map [V, K] with its bias as a row; and the weights, the momentum and the anchor of a tile.
Map = namedtuple("Map", "weights bias")
Maps = namedtuple("Maps", "W M A")
# The layer norm of a head: weight and bias as rows, the channels that there are, and eps.
Norm = namedtuple("Norm", "weight bias m_v eps")


@triton.jit
def product(b_x, b_y):
    return tl.dot(b_x, b_y, input_precision=PRECISION)


@triton.jit
def load_tile(x, i, o_s, o_c, T: tl.constexpr, C: tl.constexpr):
    """Rows o_s and channels o_c of x[i], of [.., T, C]."""
    mask = (o_s < T)[:, None] & (o_c < C)[None, :]
    return tl.load(x + (i * T + o_s[:, None]) * C + o_c[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(x, b_x, i, o_s, o_c, T: tl.constexpr, C: tl.constexpr):
    mask = (o_s < T)[:, None] & (o_c < C)[None, :]
    tl.store(x + (i * T + o_s[:, None]) * C + o_c[None, :], b_x, mask=mask)


@triton.jit
def load_column(rows, i, which: tl.constexpr, o_s, T: tl.constexpr):
    """A number for each token, [BT, 1]: one of the four of `rows` [.., 4, T]."""
    return tl.load(rows + (i * 4 + which) * T + o_s, mask=o_s < T, other=0.0)[:, None]


@triton.jit
def store_column(rows, b_x, i, which: tl.constexpr, o_s, T: tl.constexpr):
    tl.store(rows + (i * 4 + which) * T + o_s, tl.sum(b_x, axis=1), mask=o_s < T)


@triton.jit
def load_norm(weight, bias, i_h, o_v, eps, S: tl.constexpr):
    """Weight and bias are zeros without a norm."""
    b_weight = tl.zeros(o_v.shape, tl.float32)
    b_bias = b_weight
    if S.NORM:
        b_weight = tl.load(weight + i_h * S.V + o_v, mask=o_v < S.V, other=0.0)
        b_bias = tl.load(bias + i_h * S.V + o_v, mask=o_v < S.V, other=0.0)
    return Norm(b_weight[None, :], b_bias[None, :], (o_v < S.V)[None, :], eps)


@triton.jit
def applied(b_x, x):
    return product(b_x, tl.trans(x.weights)) + x.bias


@triton.jit
def written(b_g, b_x, BIAS: tl.constexpr):
    """sum_i g_i x_i^T, and of the bias, where there is one, the same with x = 1."""
    return Map(product(tl.trans(b_g), b_x), tl.sum(b_g, axis=0)[None, :] * BIAS)


@triton.jit
def mean(b_x, V: tl.constexpr):
    """Over the V channels of each row; the others are zero."""
    return tl.sum(b_x, axis=1, keep_dims=True) / V


@triton.jit
def centred(b_z, norm, V: tl.constexpr):
    """c = (z - mean) s and s = 1 / sqrt(variance + eps)."""
    b_c = tl.where(norm.m_v, b_z - mean(b_z, V), 0.0)
    b_s = tl.rsqrt(mean(b_c * b_c, V) + norm.eps)
    return b_c * b_s, b_s


@triton.jit
def loss_gradient(b_z, b_k, b_v, norm, S: tl.constexpr):
    """g = d loss / dz: of |z - v|^2, or with NORM of 1/2 |k + LN(z) - v|^2.

    e = weight (weight c + bias + k - v)        g = s (e - mean(e) - c mean(e c))
    """
    if S.NORM:
        b_c, b_s = centred(b_z, norm, S.V)
        b_e = norm.weight * (norm.weight * b_c + norm.bias + b_k - b_v)
        b_g = tl.where(norm.m_v, b_s * (b_e - mean(b_e, S.V) - b_c * mean(b_e * b_c, S.V)), 0.0)
    else:
        b_g = 2 * (b_z - b_v)
    return b_g


@triton.jit
def loss_gradient_backward(b_dg, b_z, b_k, b_v, norm, S: tl.constexpr):
    """Gradients by z, by v (by k it is the opposite), and those by weight and bias, row by row.

    With m = mean(e c) and n = mean(dg c),
        de = s (dg - mean(dg) - c n)        dc = -s (dg m + e n) + weight^2 de
        dz = s (dc - mean(dc) - c mean(dc c)) - s c mean(dg g)
    the last term because s depends on z too.
    """
    if S.NORM:
        V: tl.constexpr = S.V
        b_c, b_s = centred(b_z, norm, V)
        b_miss = norm.weight * b_c + norm.bias + b_k - b_v
        b_e = norm.weight * b_miss
        b_m, b_n = mean(b_e * b_c, V), mean(b_dg * b_c, V)
        b_g = b_s * (b_e - mean(b_e, V) - b_c * b_m)
        b_de = tl.where(norm.m_v, b_s * (b_dg - mean(b_dg, V) - b_c * b_n), 0.0)
        b_dc = norm.weight * norm.weight * b_de - b_s * (b_dg * b_m + b_e * b_n)
        b_dz = b_s * (b_dc - mean(b_dc, V) - b_c * (mean(b_dc * b_c, V) + mean(b_dg * b_g, V)))
        b_dz = tl.where(norm.m_v, b_dz, 0.0)
        b_dv = -norm.weight * b_de
        b_dweight, b_dbias = b_de * (b_miss + norm.weight * b_c), norm.weight * b_de
    else:
        b_dz = 2 * b_dg
        b_dv, b_dweight, b_dbias = -b_dz, b_dz, b_dz
    return b_dz, b_dv, b_dweight, b_dbias
