"""A linear memory through its mini-batches: one program for each row and head, both directions.

    g_i = d loss / dz at z = A x_i
    z_t = kept_t W y_t + momentum_t M y_t - sum_i R_ti (x_i . y_t) g_i
    W <- a W + b M - sum_i w_i g_i x_i^T        M <- c W + d M - sum_i u_i g_i x_i^T
    A <- W at the end of a full mini-batch

with keys x and queries y; a bias is one more channel of both, of ones. W, M and A stay in registers
from the first mini-batch to the last. Every product is of few rows, and nothing is pipelined: each
has ended before the next instruction reads what it gave.

Backward, in two kernels, with X' and Y' the gradients by W and M after the mini-batch (X' with that
by A, where the mini-batch is full), N = (y x^T) * R and h the gradient by z,

    dg = -N^T h - w X' x - u Y' x        dN = -h g^T        dR = dN * (y x^T)        dP = dN * R
    dy = kept W^T h + momentum M^T h + dP x        dx = dP^T y - X'^T w g - Y'^T u g + A^T dz
    X = a X' + c Y' + (kept h)^T y        Y = b X' + d Y' + (momentum h)^T y
    dA = (0 where full, else dA') + dz^T x

where dz is the gradient of the loss's gradient. What needs no X' or Y' is computed for all
mini-batches at once, from what a forward pass noted of W, M and A; the rest from the last to the
first. X, Y and dA stay in memory, which is the cache: beside the operands of nine products the
registers have no room for them.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.memory.triton.memory import (
    Map,
    Maps,
    applied,
    load_column,
    load_map,
    load_maps,
    load_norm,
    load_tile,
    loss_gradient,
    loss_gradient_backward,
    product,
    store_column,
    store_map,
    store_maps,
    store_tile,
    written,
)

# What is read of a mini-batch, and the memory before it.
Given = namedtuple("Given", "q d_z noted rows")
# A mini-batch: where it and its memory lie, its slots and channels.
Place = namedtuple("Place", "i i_n o_s o_k o_v")


@triton.jit(do_not_specialize=["M", "R"])
def memory_scan_kernel(
    q, k, v, rows, scalars, writes, full, owner, memory, weight, bias, z, noted, eps, M, R,
    S: tl.constexpr,
):  # fmt: skip
    """z, and `memory` in place; with `noted` also what it is before each mini-batch.

    rows [M, R, HV, 4, T] are kept, momentum, w and u; scalars [M, R, HV, 4] are a, b, c and d.
    """
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    norm = load_norm(weight, bias, i_h, o_v, eps, S)
    i_n = i_r
    if S.PACKED:
        i_n = tl.load(owner + i_r)
    maps = load_maps(memory, i_n * S.HV + i_h, o_v, o_k, S)
    for i_m in range(M):
        i = (i_m * R + i_r) * S.HV + i_h
        if S.PACKED:
            i_next = tl.load(owner + i_m * R + i_r)
            if i_next != i_n:
                store_maps(memory, maps, i_n * S.HV + i_h, o_v, o_k, S)
                maps = load_maps(memory, i_next * S.HV + i_h, o_v, o_k, S)
                i_n = i_next
        if noted is not None:
            store_maps(noted, maps, i, o_v, o_k, S)
        b_x, b_y = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
        b_v = load_tile(v, i, o_s, o_v, S.T, S.V)
        b_at = applied(b_x, maps.A)
        # The form with a norm, in which K = V, reads the key beside the value.
        b_key = b_x if S.NORM else b_v
        b_g = loss_gradient(b_at, b_key, b_v, norm, S)
        b_pair = product(b_y, tl.trans(b_x)) + S.BIAS
        b_z = load_column(rows, i, 0, o_s, S.T) * applied(b_y, maps.W)
        b_z += load_column(rows, i, 1, o_s, S.T) * applied(b_y, maps.M)
        b_z -= product(b_pair * load_tile(writes, i, o_s, o_s, S.T, S.T), b_g)
        store_tile(z, b_z, i, o_s, o_v, S.T, S.V)
        of_W = written(b_g * load_column(rows, i, 2, o_s, S.T), b_x, S.BIAS)
        of_M = written(b_g * load_column(rows, i, 3, o_s, S.T), b_x, S.BIAS)
        b_a, b_b = tl.load(scalars + i * 4), tl.load(scalars + i * 4 + 1)
        b_c, b_d = tl.load(scalars + i * 4 + 2), tl.load(scalars + i * 4 + 3)
        W, M_ = mixed(maps, b_a, b_b, of_W), mixed(maps, b_c, b_d, of_M)
        ends = tl.load(full + i_m * R + i_r) != 0
        b_A = tl.where(ends, W.weights, maps.A.weights)
        maps = Maps(W, M_, Map(b_A, tl.where(ends, W.bias, maps.A.bias)))
    store_maps(memory, maps, i_n * S.HV + i_h, o_v, o_k, S)


@triton.jit
def mixed(maps, b_a, b_b, of_map):
    b_map = b_a * maps.W.weights + b_b * maps.M.weights - of_map.weights
    return Map(b_map, b_a * maps.W.bias + b_b * maps.M.bias - of_map.bias)


@triton.jit
def inner(x, y):
    of_weights = tl.sum(tl.sum(x.weights * y.weights, axis=1), axis=0)
    return of_weights + tl.sum(tl.sum(x.bias * y.bias, axis=1), axis=0)


@triton.jit
def read_backward(b_dy, x, d_rows, which: tl.constexpr, at, S: tl.constexpr):
    """dy with what W (which = 0) or M (1) gives to it, and the gradient by kept or momentum."""
    b_y = load_tile(x.q, at.i, at.o_s, at.o_k, S.T, S.K)
    b_h = load_tile(x.d_z, at.i, at.o_s, at.o_v, S.T, S.V)
    read = load_map(x.noted, at.i, which, at.o_v, at.o_k, S)
    store_column(d_rows, b_h * applied(b_y, read), at.i, which, at.o_s, S.T)
    return b_dy + product(b_h * load_column(x.rows, at.i, which, at.o_s, S.T), read.weights)


@triton.jit
def read_backward_kernel(
    q, k, v, rows, writes, noted, weight, bias, d_z, at, g, d_g, d_q, d_k, d_rows, d_writes, eps,
    S: tl.constexpr,
):  # fmt: skip
    """One mini-batch: A x, g, and the parts of all gradients that come through z."""
    i = tl.program_id(0).to(tl.int64)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    x, here = Given(q, d_z, noted, rows), Place(i, i, o_s, o_k, o_v)
    norm = load_norm(weight, bias, i % S.HV, o_v, eps, S)
    b_x, b_v = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(v, i, o_s, o_v, S.T, S.V)
    b_at = applied(b_x, load_map(noted, i, 2, o_v, o_k, S))
    store_tile(at, b_at, i, o_s, o_v, S.T, S.V)
    b_key = b_x if S.NORM else b_v
    b_g = loss_gradient(b_at, b_key, b_v, norm, S)
    store_tile(g, b_g, i, o_s, o_v, S.T, S.V)
    b_x, b_y = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
    b_pair = product(b_y, tl.trans(b_x)) + S.BIAS
    b_h, b_R = load_tile(d_z, i, o_s, o_v, S.T, S.V), load_tile(writes, i, o_s, o_s, S.T, S.T)
    store_tile(d_g, -product(tl.trans(b_pair * b_R), b_h), i, o_s, o_v, S.T, S.V)
    b_dN = -product(b_h, tl.trans(b_g))
    store_tile(d_writes, b_dN * b_pair, i, o_s, o_s, S.T, S.T)
    b_dP = b_dN * b_R
    store_tile(d_k, product(tl.trans(b_dP), b_y), i, o_s, o_k, S.T, S.K)
    b_dy = product(b_dP, load_tile(k, i, o_s, o_k, S.T, S.K))
    b_dy = read_backward(b_dy, x, d_rows, 0, here, S)
    b_dy = read_backward(b_dy, x, d_rows, 1, here, S)
    store_tile(d_q, b_dy, i, o_s, o_k, S.T, S.K)


@triton.jit
def pass_on(x, scalars, d_memory, d_scalars, at, S: tl.constexpr):
    """Replace the gradients by W and M by those before the mini-batch; and those by a, b, c, d."""
    X = load_map(d_memory, at.i_n, 0, at.o_v, at.o_k, S)
    Y = load_map(d_memory, at.i_n, 1, at.o_v, at.o_k, S)
    for which in tl.static_range(2):
        read = load_map(x.noted, at.i, which, at.o_v, at.o_k, S)
        tl.store(d_scalars + at.i * 4 + which, inner(read, X))
        tl.store(d_scalars + at.i * 4 + 2 + which, inner(read, Y))
    # All have read what is overwritten.
    tl.debug_barrier()
    for which in tl.static_range(2):
        b_of_X = tl.load(scalars + at.i * 4 + which)
        b_of_Y = tl.load(scalars + at.i * 4 + 2 + which)
        b_h = load_tile(x.d_z, at.i, at.o_s, at.o_v, S.T, S.V)
        b_h *= load_column(x.rows, at.i, which, at.o_s, S.T)
        b_y = load_tile(x.q, at.i, at.o_s, at.o_k, S.T, S.K)
        b_new, b_newb = written(b_h, b_y, S.BIAS)
        b_new += b_of_X * X.weights + b_of_Y * Y.weights
        b_newb += b_of_X * X.bias + b_of_Y * Y.bias
        store_map(d_memory, Map(b_new, b_newb), at.i_n, which, at.o_v, at.o_k, S)


@triton.jit(do_not_specialize=["M", "R"])
def memory_backward_kernel(
    q, k, v, rows, scalars, full, owner, noted, weight, bias, d_z, at, g, d_g, d_memory,
    d_k, d_v, d_rows, d_scalars, d_weight, d_bias, eps, M, R, S: tl.constexpr,
):  # fmt: skip
    """The rest, d_memory in place; d_weight and d_bias [R, HV, V] are parts of a sum."""
    x = Given(q, d_z, noted, rows)
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    norm = load_norm(weight, bias, i_h, o_v, eps, S)
    b_dweight, b_dbias = tl.zeros([S.BV], tl.float32), tl.zeros([S.BV], tl.float32)
    for i_back in range(M):
        i_m = M - 1 - i_back
        i, i_n = (i_m * R + i_r) * S.HV + i_h, i_r * S.HV + i_h
        if S.PACKED:
            i_n = tl.load(owner + i_m * R + i_r) * S.HV + i_h
        ends = tl.load(full + i_m * R + i_r) != 0
        b_dA, b_dAb = load_map(d_memory, i_n, 2, o_v, o_k, S)
        b_X, b_Xb = load_map(d_memory, i_n, 0, o_v, o_k, S)
        X = Map(b_X + tl.where(ends, b_dA, 0.0), b_Xb + tl.where(ends, b_dAb, 0.0))
        tl.debug_barrier()
        store_map(d_memory, X, i_n, 0, o_v, o_k, S)
        # Through what the mini-batch writes. Tiles are read again where they are needed again: an
        # operand that is kept fills a quarter of the registers.
        b_x, b_g = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(g, i, o_s, o_v, S.T, S.V)
        b_w, b_xX = load_column(rows, i, 2, o_s, S.T), applied(b_x, X)
        store_column(d_rows, -b_g * b_xX, i, 2, o_s, S.T)
        b_dx = load_tile(d_k, i, o_s, o_k, S.T, S.K) - product(b_w * b_g, X.weights)
        b_dg = load_tile(d_g, i, o_s, o_v, S.T, S.V) - b_w * b_xX
        Y = load_map(d_memory, i_n, 1, o_v, o_k, S)
        b_u, b_xY = load_column(rows, i, 3, o_s, S.T), applied(b_x, Y)
        store_column(d_rows, -b_g * b_xY, i, 3, o_s, S.T)
        b_dx -= product(b_u * b_g, Y.weights)
        b_dg -= b_u * b_xY
        # Through the gradient that was taken at A.
        b_x, b_v = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(v, i, o_s, o_v, S.T, S.V)
        b_key = b_x if S.NORM else b_v
        b_at = load_tile(at, i, o_s, o_v, S.T, S.V)
        b_dz, b_dv, b_dw_rows, b_db_rows = loss_gradient_backward(b_dg, b_at, b_key, b_v, norm, S)
        store_tile(d_v, b_dv, i, o_s, o_v, S.T, S.V)
        if S.NORM:
            # In the loss stands k - v.
            b_dx -= b_dv
            b_dweight += tl.sum(b_dw_rows, axis=0)
            b_dbias += tl.sum(b_db_rows, axis=0)
        # By way of memory: the compiler would compute dz once more in the layout of an operand.
        store_tile(at, b_dz, i, o_s, o_v, S.T, S.V)
        tl.debug_barrier()
        b_dz = load_tile(at, i, o_s, o_v, S.T, S.V)
        b_map, _ = load_map(noted, i, 2, o_v, o_k, S)
        store_tile(d_k, b_dx + product(b_dz, b_map), i, o_s, o_k, S.T, S.K)
        b_new, b_newb = written(b_dz, load_tile(k, i, o_s, o_k, S.T, S.K), S.BIAS)
        b_dA, b_dAb = load_map(d_memory, i_n, 2, o_v, o_k, S)
        b_new += tl.where(ends, 0.0, b_dA)
        b_newb += tl.where(ends, 0.0, b_dAb)
        store_map(d_memory, Map(b_new, b_newb), i_n, 2, o_v, o_k, S)
        # Through W and M, as they are read and as they go on.
        tl.debug_barrier()
        here = Place(i, i_n, o_s, o_k, o_v)
        pass_on(x, scalars, d_memory, d_scalars, here, S)
        tl.debug_barrier()
    if S.NORM:
        tl.store(d_weight + (i_r * S.HV + i_h) * S.V + o_v, b_dweight, mask=o_v < S.V)
        tl.store(d_bias + (i_r * S.HV + i_h) * S.V + o_v, b_dbias, mask=o_v < S.V)
