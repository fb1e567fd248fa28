"""A memory of one or two maps through its mini-batches, forward, its maps streamed from the cache.

The equations, and what is moved, are in network.py; nothing is pipelined, as in scan.py.
"""

import triton
import triton.language as tl

from deltarule.ops.memory.triton import network
from deltarule.ops.memory.triton.memory import (
    Maps,
    load_norm,
    load_tile,
    loss_gradient,
    product,
    store_tile,
    written,
)


@triton.jit
def store_parts(memory, i, tile, maps, keeps_M, keeps_A, S: tl.constexpr):
    """A tile of W, and of M and A where they will be read."""
    p_x = memory + i * (S.PARTS * S.SIZE) + tile.o
    tl.store(p_x, maps.W, mask=tile.mask)
    tl.store(p_x + S.SIZE, maps.M, mask=tile.mask & keeps_M)
    if S.PARTS == 3:
        tl.store(p_x + 2 * S.SIZE, maps.A, mask=tile.mask & keeps_A)


@triton.jit
def move_on(x, tile, maps, b_of_W, b_of_M, at, S: tl.constexpr):
    """Note a tile of W, M and A, and store what it is after the mini-batch."""
    b_W, b_M, b_A = maps
    p_a = x.scalars + at.i * 4
    b_next = tl.load(p_a) * b_W + tl.load(p_a + 1) * b_M - b_of_W
    b_next_M = tl.load(p_a + 2) * b_W + tl.load(p_a + 3) * b_M - b_of_M
    b_next_A = tl.where(at.ends, b_next, b_A)
    begins, goes_on = at.settled == 0, at.ends == 0
    # All have read what is overwritten.
    tl.debug_barrier()
    if x.noted is not None:
        store_parts(x.noted, at.i, tile, maps, begins | (S.PARTS == 3), begins, S)
    keeps_M, keeps_A = at.last | goes_on | (S.PARTS == 3), at.last | (at.settled & goes_on)
    moved = Maps(b_next, b_next_M, b_next_A)
    store_parts(x.memory, at.i_n, tile, moved, keeps_M, keeps_A, S)


@triton.jit(do_not_specialize=["M", "R"])
def network_scan_kernel(
    q, k, v, rows, scalars, writes, full, owner, memory, weight, bias, z, noted, eps, M, R,
    S: tl.constexpr,
):  # fmt: skip
    """z, and `memory` in place; with `noted` also what it is before each mini-batch.

    rows [M, R, HV, 4, T] are kept, momentum, w and u; scalars [M, R, HV, 4] are a, b, c and d.
    """
    x = network.Given(q, k, rows, scalars, memory, noted)
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    b_weight, b_bias = load_norm(weight, bias, i_h, o_v, S.V, S.NORM)
    of_bias = network.last_bias(o_v, S)
    for i_m in range(M):
        i = (i_m * R + i_r) * S.HV + i_h
        i_n = network.row_of(owner, i_m, i_r, R, S.PACKED) * S.HV + i_h
        settled = network.is_settled(full, owner, i_m, i_r, R, S.PACKED)
        ends, last = (
            network.is_full(full, i_m, i_r, R),
            network.is_last(owner, i_m, i_r, M, R, S.PACKED),
        )
        at = network.Place(i, i_n, settled, ends, last, o_s, o_k, o_v)
        # The network on the keys, and the gradient of the loss.
        b_at = network.trained(x, at, S)
        b_v = load_tile(v, i, o_s, o_v, S.T, S.V)
        # The form with a norm, in which K = V, reads the key beside the value.
        b_key = load_tile(k, i, o_s, o_v, S.T, S.K) if S.NORM else b_v
        m_v = (o_v < S.V)[None, :]
        b_g = loss_gradient(b_at, b_key, b_v, b_weight, b_bias, m_v, eps, S.V, S.NORM)
        # The network on the queries, and what the maps become.
        columns = network.load_columns(rows, i, o_s, S.T)
        biases = network.load_parts(memory, i_n, of_bias, settled, S)
        b_z = columns.kept * biases.W + columns.momentum * biases.M
        b_of_Wb = tl.sum(columns.w * b_g, axis=0)[None, :]
        b_of_Mb = tl.sum(columns.u * b_g, axis=0)[None, :]
        move_on(x, of_bias, biases, b_of_Wb, b_of_Mb, at, S)
        b_R = load_tile(writes, i, o_s, o_s, S.T, S.T)
        b_N = b_R
        if S.DEEP:
            b_k, b_q = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
            b_N = (product(b_q, tl.trans(b_k)) + S.BIAS) * b_R
        b_pair = tl.zeros([S.BT, S.BT], tl.float32) + S.BIAS
        # A tile that is read again in each block fills no registers between products.
        store_tile(z, b_g, i, o_s, o_v, S.T, S.V)
        tl.debug_barrier()
        for c in range(0, S.C, S.BC):
            o_c = c + tl.arange(0, S.BC)
            b_g = load_tile(z, i, o_s, o_v, S.T, S.V)
            tile = network.last_tile(o_v, o_c, S)
            maps = network.load_parts(memory, i_n, tile, settled, S)
            if S.DEEP:
                b_t = product(b_g, maps.A)
                b_x, b_y = through_first_map(x, b_N, b_t, columns, o_c, at, S)
            else:
                b_x, b_y = load_tile(k, i, o_s, o_c, S.T, S.K), load_tile(q, i, o_s, o_c, S.T, S.K)
            b_pair += product(b_y, tl.trans(b_x))
            b_z += network.read_tile(b_y, maps, columns, settled, S.PARTS)
            b_of_W, _ = written(columns.w * b_g, b_x, S.BIAS)
            b_of_M, _ = written(columns.u * b_g, b_x, S.BIAS)
            move_on(x, tile, maps, b_of_W, b_of_M, at, S)
        b_z -= product(b_pair * b_R, load_tile(z, i, o_s, o_v, S.T, S.V))
        tl.debug_barrier()
        store_tile(z, b_z, i, o_s, o_v, S.T, S.V)
        # Other threads read what is stored.
        tl.debug_barrier()


@triton.jit
def through_first_map(x, b_N, b_t, columns, o_c, at, S: tl.constexpr):
    """x and y of channels o_c, from t = A^T g there; the rows of the first map move on."""
    tile, bias = network.first_tile(o_c, at.o_k, S)
    b_at, b_g, b_u1, maps, biases = network.first_map(x, b_t, b_N, columns, o_c, at, S)
    b_k = load_tile(x.k, at.i, at.o_s, at.o_k, S.T, S.K)
    b_of_W, b_of_Wb = written(columns.w * b_g, b_k, S.BIAS)
    b_of_M, b_of_Mb = written(columns.u * b_g, b_k, S.BIAS)
    move_on(x, tile, maps, b_of_W, b_of_M, at, S)
    move_on(x, bias, biases, b_of_Wb, b_of_Mb, at, S)
    return network.gelu(b_at), network.gelu(b_u1)
