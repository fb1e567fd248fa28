"""A memory of one or two maps through its mini-batches, backward, its maps streamed.

For each map, with what enters and leaves it (network.py), X and Y the gradients by W and M after
the mini-batch, P = y x^T + bias, N = P * R and h the gradient by what is read of it,

    dg = -N^T h - w X x - u Y x        dN = -h g^T        dR = dN * P        dP = dN * R
    dy = kept W^T h + momentum M^T h + dP x        dx = dP^T y - X^T w g - Y^T u g
    X <- a X + c Y + (kept h)^T y      Y <- b X + d Y + (momentum h)^T y

Between two maps h_1 = dy * gelu'(u), where u is what the first one reads. The second derivatives
come in where a gradient was taken: with t = A^T g, so that g_1 = t * gelu'(A_1 k),

    dt = dg_1 * gelu'(A_1 k)        dg += A dt        dz by dg, through the loss's gradient
    dx += A^T dz                    da = dx * gelu'(A_1 k) + dg_1 * t * gelu''(A_1 k)
    dA = dz^T x + g^T dt            dk += A_1^T da        dA_1 = da^T k

The first kernel has what needs no X or Y; of a network of two maps it leaves the tiles [T, C] that
the second one needs, A_1 k, t, u, h_1 and the first part of dg_1, so that nothing of the network is
computed twice. dA goes to X where A is W, and to a part of its own elsewhere.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.memory.triton import network
from deltarule.ops.memory.triton.memory import (
    Maps,
    load_column,
    load_norm,
    load_tile,
    loss_gradient,
    loss_gradient_backward,
    product,
    store_column,
    store_tile,
    written,
)

# Tiles [T, C] that the first kernel leaves of a network of two maps.
TILES = tl.constexpr(5)
AT, T, READ, H, DG = (tl.constexpr(which) for which in range(5))
# What the first kernel leaves for the second, and where gradients go.
Gradients = namedtuple("Gradients", "d_z g tiles d_g d_x d_memory d_k d_rows")
# X and Y, the gradients by W and M, of a tile; and those by a to d.
Later = namedtuple("Later", "X Y")
Scalars = namedtuple("Scalars", "a b c d")


@triton.jit
def load_inner(tiles, which: tl.constexpr, o_c, at, S: tl.constexpr):
    return load_tile(tiles, at.i * TILES + which, at.o_s, o_c, S.T, S.C)


@triton.jit
def store_inner(tiles, b_x, which: tl.constexpr, o_c, at, S: tl.constexpr):
    store_tile(tiles, b_x, at.i * TILES + which, at.o_s, o_c, S.T, S.C)


@triton.jit
def read_tile_backward(b_h, b_y, maps, columns, settled, PARTS: tl.constexpr):
    """Gradients of read_tile: by y, and by kept and momentum of each row."""
    b_hW = product(b_h, maps.W)
    b_dy, b_dkept = columns.kept * b_hW, tl.sum(b_hW * b_y, axis=1)
    b_dmomentum = tl.zeros_like(b_dkept)
    if (settled == 0) | (PARTS == 3):
        b_hM = product(b_h, maps.M)
        b_dy += columns.momentum * b_hM
        b_dmomentum += tl.sum(b_hM * b_y, axis=1)
    return b_dy, b_dkept, b_dmomentum


@triton.jit
def first_map_backward(x, tiles, b_dy, b_u, b_g, b_N, columns, o_c, at, S: tl.constexpr):
    """Given dy of channels o_c: gradients by q, kept, momentum and N; h_1 and part of dg_1."""
    tile, bias = network.first_tile(o_c, at.o_k, S)
    b_slope, _ = network.gelu_slopes(b_u)
    b_h = b_dy * b_slope
    # Before the wide products: the layout of the last one in a loop is that of all.
    b_dN = -product(b_h, tl.trans(b_g))
    store_inner(tiles, b_h, H, o_c, at, S)
    store_inner(tiles, -product(tl.trans(b_N), b_h), DG, o_c, at, S)
    maps = network.load_parts(x.memory, at.i, tile, at.settled, S)
    biases = network.load_parts(x.memory, at.i, bias, at.settled, S)
    b_q = load_tile(x.q, at.i, at.o_s, at.o_k, S.T, S.K)
    b_dq, b_dkept, b_dmomentum = read_tile_backward(b_h, b_q, maps, columns, at.settled, S.PARTS)
    b_dkept += tl.sum(b_h * biases.W, axis=1)
    b_dmomentum += tl.sum(b_h * biases.M, axis=1)
    return b_dq, b_dkept, b_dmomentum, b_dN


@triton.jit(do_not_specialize=["R"])
def network_read_backward_kernel(
    q, k, v, rows, writes, full, owner, noted, weight, bias, d_z, at, g, tiles, d_g, d_x,
    d_q, d_k, d_rows, d_writes, eps, R, S: tl.constexpr,
):  # fmt: skip
    """One mini-batch: A x, g, the tiles, and the parts of all gradients that come through z."""
    x = network.Given(q, k, rows, None, noted, None)
    i_r, i_h, i_m = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i = (i_m * R + i_r) * S.HV + i_h
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    norm = load_norm(weight, bias, i_h, o_v, eps, S)
    settled = network.is_settled(full, owner, i_m, i_r, R, S.PACKED)
    here = network.Place(i, i, settled, None, None, o_s, o_k, o_v)
    b_at = network.trained(x, here, S)
    store_tile(at, b_at, i, o_s, o_v, S.T, S.V)
    b_v = load_tile(v, i, o_s, o_v, S.T, S.V)
    b_key = load_tile(k, i, o_s, o_v, S.T, S.K) if S.NORM else b_v
    b_g = loss_gradient(b_at, b_key, b_v, norm, S)
    store_tile(g, b_g, i, o_s, o_v, S.T, S.V)
    b_h, b_R = load_tile(d_z, i, o_s, o_v, S.T, S.V), load_tile(writes, i, o_s, o_s, S.T, S.T)
    columns = network.load_columns(rows, i, o_s, S.T)
    biases = network.load_parts(noted, i, network.last_bias(o_v, S), settled, S)
    b_dkept, b_dmomentum = tl.sum(b_h * biases.W, axis=1), tl.sum(b_h * biases.M, axis=1)
    b_dN = -product(b_h, tl.trans(b_g))
    b_dP, b_pair = b_dN * b_R, tl.zeros([S.BT, S.BT], tl.float32) + S.BIAS
    if S.DEEP:
        b_k, b_q = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
        b_pair1, b_dN1 = product(b_q, tl.trans(b_k)) + S.BIAS, tl.zeros([S.BT, S.BT], tl.float32)
        b_dq = tl.zeros([S.BT, S.BK], tl.float32)
    # Tiles that are read again in each block fill no registers between products.
    tl.debug_barrier()
    for c in range(0, S.C, S.BC):
        o_c = c + tl.arange(0, S.BC)
        b_g, b_h = load_tile(g, i, o_s, o_v, S.T, S.V), load_tile(d_z, i, o_s, o_v, S.T, S.V)
        maps = network.load_parts(noted, i, network.last_tile(o_v, o_c, S), settled, S)
        if S.DEEP:
            b_t = product(b_g, maps.A)
            b_a1, b_g1, b_u1, _, _ = network.first_map(x, b_t, b_pair1 * b_R, columns, o_c, here, S)
            store_inner(tiles, b_a1, AT, o_c, here, S)
            store_inner(tiles, b_t, T, o_c, here, S)
            store_inner(tiles, b_u1, READ, o_c, here, S)
            b_x, b_y = network.gelu(b_a1), network.gelu(b_u1)
        else:
            b_x, b_y = load_tile(k, i, o_s, o_c, S.T, S.K), load_tile(q, i, o_s, o_c, S.T, S.K)
        b_pair += product(b_y, tl.trans(b_x))
        store_tile(d_x, product(tl.trans(b_dP), b_y), i, o_s, o_c, S.T, S.C)
        b_dy, b_dkept_c, b_dmomentum_c = read_tile_backward(
            b_h, b_y, maps, columns, settled, S.PARTS
        )
        b_dy += product(b_dP, b_x)
        b_dkept += b_dkept_c
        b_dmomentum += b_dmomentum_c
        if S.DEEP:
            b_dq_c, b_dkept_c, b_dmomentum_c, b_dN_c = first_map_backward(
                x, tiles, b_dy, b_u1, b_g1, b_pair1 * b_R, columns, o_c, here, S
            )
            b_dq += b_dq_c
            b_dkept += b_dkept_c
            b_dmomentum += b_dmomentum_c
            b_dN1 += b_dN_c
        else:
            store_tile(d_q, b_dy, i, o_s, o_c, S.T, S.K)
    store_column(d_rows, b_dkept[:, None], i, 0, o_s, S.T)
    store_column(d_rows, b_dmomentum[:, None], i, 1, o_s, S.T)
    b_h = load_tile(d_z, i, o_s, o_v, S.T, S.V)
    store_tile(d_g, -product(tl.trans(b_pair * b_R), b_h), i, o_s, o_v, S.T, S.V)
    b_dR = b_dN * b_pair
    if S.DEEP:
        b_dR += b_dN1 * b_pair1
        b_dP = b_dN1 * b_R
        b_k, b_q = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
        store_tile(d_q, b_dq + product(b_dP, b_k), i, o_s, o_k, S.T, S.K)
        store_tile(d_k, product(tl.trans(b_dP), b_q), i, o_s, o_k, S.T, S.K)
    store_tile(d_writes, b_dR, i, o_s, o_s, S.T, S.T)


@triton.jit
def load_gradients(d_memory, tile, at, S: tl.constexpr):
    """A tile of X and Y; X has the gradient by A, too, where that is W after the mini-batch."""
    p_x = d_memory + at.i_n * (S.PARTS * S.SIZE) + tile.o
    b_X = tl.load(p_x, mask=tile.mask, other=0.0)
    m_Y = tile.mask & ((at.ends == 0) | (S.PARTS == 3))
    b_Y = tl.load(p_x + S.SIZE, mask=m_Y, other=0.0)
    if S.PARTS == 3:
        b_X += tl.load(p_x + 2 * S.SIZE, mask=tile.mask & (at.ends & at.last), other=0.0)
    return Later(b_X, b_Y)


@triton.jit
def through_writes(b_x, b_g, columns, later, ends, PARTS: tl.constexpr):
    """X x, Y x, and X^T w g + Y^T u g of each row."""
    b_xX, b_dx = product(b_x, tl.trans(later.X)), product(columns.w * b_g, later.X)
    b_xY = tl.zeros_like(b_xX)
    # In `ttt` M is zero after a full mini-batch, whatever was before.
    if (ends == 0) | (PARTS == 3):
        b_xY += product(b_x, tl.trans(later.Y))
        b_dx += product(columns.u * b_g, later.Y)
    return b_xX, b_xY, b_dx


@triton.jit
def pass_on(x, d_memory, tile, later, given, at, S: tl.constexpr):
    """Replace a tile of X, Y and dA by that before the mini-batch; and the gradients by a to d.

    What the mini-batch itself gives to W, M and A is `given`. In `ttt` a and c are constants.
    """
    b_of_W, b_of_M, b_dA = given
    p_x = d_memory + at.i_n * (S.PARTS * S.SIZE) + tile.o
    d_a, d_b, d_c, d_d = 0.0, 0.0, 0.0, 0.0
    if (at.settled == 0) | (S.PARTS == 3):
        b_W, b_M, _ = network.load_parts(x.noted, at.i, tile, at.settled, S)
        d_a += tl.sum(tl.sum(b_W * later.X, axis=1), axis=0)
        d_b += tl.sum(tl.sum(b_M * later.X, axis=1), axis=0)
        d_c += tl.sum(tl.sum(b_W * later.Y, axis=1), axis=0)
        d_d += tl.sum(tl.sum(b_M * later.Y, axis=1), axis=0)
    p_a = x.scalars + at.i * 4
    b_new = tl.load(p_a) * later.X + tl.load(p_a + 2) * later.Y + b_of_W
    b_new_Y = tl.load(p_a + 1) * later.X + tl.load(p_a + 3) * later.Y + b_of_M
    begins = at.settled == 0
    if S.PARTS == 3:
        b_dA += tl.load(p_x + 2 * S.SIZE, mask=tile.mask & (at.ends == 0), other=0.0)
        b_new += tl.where(at.settled, b_dA, 0.0)
    else:
        b_new += b_dA
    # All have read what is overwritten.
    tl.debug_barrier()
    tl.store(p_x, b_new, mask=tile.mask)
    tl.store(p_x + S.SIZE, b_new_Y, mask=tile.mask & (begins | (S.PARTS == 3)))
    if S.PARTS == 3:
        tl.store(p_x + 2 * S.SIZE, b_dA, mask=tile.mask & begins)
    return Scalars(d_a, d_b, d_c, d_d)


@triton.jit
def plus(x, y):
    return Scalars(x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d)


@triton.jit
def first_map_writes(x, y, columns, o_c, at, S: tl.constexpr):
    """For the rows o_c of the first map: dt, and the gradients by k, w and u.

    The tile of dg_1 becomes complete.
    """
    tile, bias = network.first_tile(o_c, at.o_k, S)
    later = load_gradients(y.d_memory, tile, at, S)
    of_bias = load_gradients(y.d_memory, bias, at, S)
    b_slope, _ = network.gelu_slopes(load_inner(y.tiles, AT, o_c, at, S))
    b_g = load_inner(y.tiles, T, o_c, at, S) * b_slope
    b_k = load_tile(x.k, at.i, at.o_s, at.o_k, S.T, S.K)
    b_xX, b_xY, b_dx = through_writes(b_k, b_g, columns, later, at.ends, S.PARTS)
    b_xX += of_bias.X
    b_xY += of_bias.Y
    b_dg = load_inner(y.tiles, DG, o_c, at, S) - columns.w * b_xX - columns.u * b_xY
    store_inner(y.tiles, b_dg, DG, o_c, at, S)
    return b_dg * b_slope, b_dx, tl.sum(b_g * b_xX, axis=1), tl.sum(b_g * b_xY, axis=1)


@triton.jit
def first_map_anchor(x, y, b_dx, o_c, at, S: tl.constexpr):
    """Given dx of channels o_c: the gradient by k, and those by the first map and by a to d."""
    tile, bias = network.first_tile(o_c, at.o_k, S)
    b_slope, b_second = network.gelu_slopes(load_inner(y.tiles, AT, o_c, at, S))
    b_dg = load_inner(y.tiles, DG, o_c, at, S)
    b_t = load_inner(y.tiles, T, o_c, at, S)
    b_dat = b_dx * b_slope + b_dg * b_t * b_second
    p_A = network.anchor_of(x.noted, at.i, at.settled, S)
    b_dk = product(b_dat, tl.load(p_A + tile.o, mask=tile.mask, other=0.0))
    b_k = load_tile(x.k, at.i, at.o_s, at.o_k, S.T, S.K)
    b_dA, b_dAb = written(b_dat, b_k, S.BIAS)
    b_h = load_inner(y.tiles, H, o_c, at, S)
    b_q = load_tile(x.q, at.i, at.o_s, at.o_k, S.T, S.K)
    b_of_W, b_of_Wb = written(b_h * load_column(x.rows, at.i, 0, at.o_s, S.T), b_q, S.BIAS)
    b_of_M, b_of_Mb = written(b_h * load_column(x.rows, at.i, 1, at.o_s, S.T), b_q, S.BIAS)
    later = load_gradients(y.d_memory, tile, at, S)
    of_bias = load_gradients(y.d_memory, bias, at, S)
    given, given_bias = Maps(b_of_W, b_of_M, b_dA), Maps(b_of_Wb, b_of_Mb, b_dAb)
    by_map = pass_on(x, y.d_memory, tile, later, given, at, S)
    by_bias = pass_on(x, y.d_memory, bias, of_bias, given_bias, at, S)
    return b_dk, plus(by_map, by_bias)


@triton.jit
def writes_backward(x, y, at, S: tl.constexpr):
    """Through what the mini-batch writes: dg, dk of two maps, and in memory dx, dw and du."""
    i, o_s, o_v = at.i, at.o_s, at.o_v
    bias = network.last_bias(o_v, S)
    p_A = network.anchor_of(x.noted, i, at.settled, S)
    b_dg = load_tile(y.d_g, i, o_s, o_v, S.T, S.V)
    columns = network.load_columns(x.rows, i, o_s, S.T)
    of_bias = load_gradients(y.d_memory, bias, at, S)
    b_xX = tl.zeros([S.BT, S.BV], tl.float32) + of_bias.X
    b_xY = tl.zeros([S.BT, S.BV], tl.float32) + of_bias.Y
    b_gX, b_gY = tl.zeros([S.BT], tl.float32), tl.zeros([S.BT], tl.float32)
    b_dk = load_tile(y.d_k, i, o_s, at.o_k, S.T, S.K)
    for c in range(0, S.C, S.BC):
        o_c = c + tl.arange(0, S.BC)
        tile = network.last_tile(o_v, o_c, S)
        if S.DEEP:
            b_dt, b_dk_c, b_gX_c, b_gY_c = first_map_writes(x, y, columns, o_c, at, S)
            b_dg += product(b_dt, tl.trans(tl.load(p_A + tile.o, mask=tile.mask, other=0.0)))
            b_dk -= b_dk_c
            b_gX += b_gX_c
            b_gY += b_gY_c
            b_x = network.gelu(load_inner(y.tiles, AT, o_c, at, S))
        else:
            b_x = load_tile(x.k, i, o_s, o_c, S.T, S.K)
        b_g = load_tile(y.g, i, o_s, o_v, S.T, S.V)
        later = load_gradients(y.d_memory, tile, at, S)
        b_xX_c, b_xY_c, b_dx = through_writes(b_x, b_g, columns, later, at.ends, S.PARTS)
        b_xX += b_xX_c
        b_xY += b_xY_c
        b_dx = load_tile(y.d_x, i, o_s, o_c, S.T, S.C) - b_dx
        store_tile(y.d_x, b_dx, i, o_s, o_c, S.T, S.C)
    b_g = load_tile(y.g, i, o_s, o_v, S.T, S.V)
    b_dg -= columns.w * b_xX + columns.u * b_xY
    b_gX += tl.sum(b_g * b_xX, axis=1)
    b_gY += tl.sum(b_g * b_xY, axis=1)
    store_column(y.d_rows, -b_gX[:, None], i, 2, o_s, S.T)
    store_column(y.d_rows, -b_gY[:, None], i, 3, o_s, S.T)
    return b_dg, b_dk


@triton.jit(do_not_specialize=["M", "R"])
def network_backward_kernel(
    q, k, v, rows, scalars, full, owner, noted, weight, bias, d_z, at, g, tiles, d_g, d_x,
    d_memory, d_k, d_v, d_rows, d_scalars, d_weight, d_bias, eps, M, R, S: tl.constexpr,
):  # fmt: skip
    """The rest, d_memory in place; d_weight and d_bias [R, HV, V] are parts of a sum."""
    x = network.Given(q, k, rows, scalars, None, noted)
    y = Gradients(d_z, g, tiles, d_g, d_x, d_memory, d_k, d_rows)
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    norm = load_norm(weight, bias, i_h, o_v, eps, S)
    b_dweight, b_dbias = tl.zeros([S.BV], tl.float32), tl.zeros([S.BV], tl.float32)
    of_bias = network.last_bias(o_v, S)
    for i_back in range(M):
        i_m = M - 1 - i_back
        here = network.place_of(full, owner, i_m, M, R, i_r, i_h, o_s, o_k, o_v, S)
        i, settled = here.i, here.settled
        b_dg, b_dk = writes_backward(x, y, here, S)
        # Through the gradient that was taken at A.
        b_v = load_tile(v, i, o_s, o_v, S.T, S.V)
        b_key = load_tile(k, i, o_s, o_v, S.T, S.K) if S.NORM else b_v
        b_at = load_tile(at, i, o_s, o_v, S.T, S.V)
        b_dz, b_dv, b_dw_rows, b_db_rows = loss_gradient_backward(b_dg, b_at, b_key, b_v, norm, S)
        store_tile(d_v, b_dv, i, o_s, o_v, S.T, S.V)
        if S.NORM:
            b_dweight += tl.sum(b_dw_rows, axis=0)
            b_dbias += tl.sum(b_db_rows, axis=0)
        # By way of memory: the compiler would compute dz once more in the layout of an operand.
        tl.debug_barrier()
        store_tile(at, b_dz, i, o_s, o_v, S.T, S.V)
        tl.debug_barrier()
        later = load_gradients(d_memory, of_bias, here, S)
        b_dAb = tl.sum(b_dz, axis=0)[None, :] * S.BIAS
        b_h = load_tile(d_z, i, o_s, o_v, S.T, S.V)
        b_of_Wb = tl.sum(b_h * load_column(rows, i, 0, o_s, S.T), axis=0)[None, :]
        b_of_Mb = tl.sum(b_h * load_column(rows, i, 1, o_s, S.T), axis=0)[None, :]
        given = Maps(b_of_Wb, b_of_Mb, b_dAb)
        d_scalar = pass_on(x, d_memory, of_bias, later, given, here, S)
        for c in range(0, S.C, S.BC):
            o_c = c + tl.arange(0, S.BC)
            tile = network.last_tile(o_v, o_c, S)
            b_dz = load_tile(at, i, o_s, o_v, S.T, S.V)
            p_A = network.anchor_of(noted, i, settled, S)
            b_dx = product(b_dz, tl.load(p_A + tile.o, mask=tile.mask, other=0.0))
            b_dx += load_tile(d_x, i, o_s, o_c, S.T, S.C)
            if S.DEEP:
                b_dk_c, d_first = first_map_anchor(x, y, b_dx, o_c, here, S)
                b_dk += b_dk_c
                d_scalar = plus(d_scalar, d_first)
                b_a1 = load_inner(tiles, AT, o_c, here, S)
                b_slope, _ = network.gelu_slopes(b_a1)
                b_dt = load_inner(tiles, DG, o_c, here, S) * b_slope
                b_dA, _ = written(load_tile(g, i, o_s, o_v, S.T, S.V), b_dt, S.BIAS)
                b_x, b_y = network.gelu(b_a1), network.gelu(load_inner(tiles, READ, o_c, here, S))
            else:
                store_tile(d_k, b_dx, i, o_s, o_c, S.T, S.K)
                b_dA = tl.zeros([S.BV, S.BC], tl.float32)
                b_x, b_y = load_tile(k, i, o_s, o_c, S.T, S.K), load_tile(q, i, o_s, o_c, S.T, S.K)
            b_of_x, _ = written(b_dz, b_x, S.BIAS)
            b_h = load_tile(d_z, i, o_s, o_v, S.T, S.V)
            b_of_W, _ = written(b_h * load_column(rows, i, 0, o_s, S.T), b_y, S.BIAS)
            b_of_M, _ = written(b_h * load_column(rows, i, 1, o_s, S.T), b_y, S.BIAS)
            later_c = load_gradients(d_memory, tile, here, S)
            given_c = Maps(b_of_W, b_of_M, b_dA + b_of_x)
            d_scalar = plus(d_scalar, pass_on(x, d_memory, tile, later_c, given_c, here, S))
        if S.DEEP:
            store_tile(d_k, b_dk, i, o_s, o_k, S.T, S.K)
        tl.store(d_scalars + i * 4, d_scalar.a)
        tl.store(d_scalars + i * 4 + 1, d_scalar.b)
        tl.store(d_scalars + i * 4 + 2, d_scalar.c)
        tl.store(d_scalars + i * 4 + 3, d_scalar.d)
        tl.debug_barrier()
    if S.NORM:
        tl.store(d_weight + (i_r * S.HV + i_h) * S.V + o_v, b_dweight, mask=o_v < S.V)
        tl.store(d_bias + (i_r * S.HV + i_h) * S.V + o_v, b_dbias, mask=o_v < S.V)
