"""A memory of one map through its mini-batches, forward, its map in registers.

The equations are those of network.py with y = q and x = k. W, M and A stay in registers from the
first mini-batch to the last. Every product is of few rows, and nothing is pipelined: each has ended
before the next instruction reads what it gave. Backwards, beside the operands of nine products, the
registers have no room for the gradients by W, M and A: network_backward.py streams those, and what
this forward has noted.
"""

import triton
import triton.language as tl

from deltarule.ops.memory.triton import network
from deltarule.ops.memory.triton.memory import (
    Map,
    Maps,
    applied,
    load_column,
    load_norm,
    load_tile,
    loss_gradient,
    product,
    store_tile,
    written,
)


@triton.jit
def load_both(memory, i, tile, of_bias, S: tl.constexpr):
    """W, M and A, and the biases of each, zeros if there is none."""
    b_none = tl.zeros([1, S.BV], tl.float32)
    biases = Maps(b_none, b_none, b_none)
    if S.BIAS:
        biases = network.load_parts(memory, i, of_bias, False, S)
    return network.load_parts(memory, i, tile, False, S), biases


@triton.jit
def store_both(memory, i, tile, of_bias, maps, biases, S: tl.constexpr):
    network.store_parts(memory, i, tile, maps, True, True, S)
    if S.BIAS:
        network.store_parts(memory, i, of_bias, biases, True, True, S)


@triton.jit
def moved(b_a, b_b, b_c, b_d, ends, maps, b_of_W, b_of_M):
    """W, M and A after a mini-batch that writes so much to W and M."""
    b_W = b_a * maps.W + b_b * maps.M - b_of_W
    return Maps(b_W, b_c * maps.W + b_d * maps.M - b_of_M, tl.where(ends, b_W, maps.A))


@triton.jit(do_not_specialize=["M", "R"])
def held_scan_kernel(
    q, k, v, rows, scalars, writes, full, owner, memory, weight, bias, z, noted, eps, M, R,
    S: tl.constexpr,
):  # fmt: skip
    """As `network_scan_kernel`."""
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    norm = load_norm(weight, bias, i_h, o_v, eps, S)
    tile, of_bias = network.last_tile(o_v, o_k, S), network.last_bias(o_v, S)
    i_n = i_r
    if S.PACKED:
        i_n = tl.load(owner + i_r)
    maps, biases = load_both(memory, i_n * S.HV + i_h, tile, of_bias, S)
    for i_m in range(M):
        i = (i_m * R + i_r) * S.HV + i_h
        if S.PACKED:
            i_next = tl.load(owner + i_m * R + i_r)
            if i_next != i_n:
                store_both(memory, i_n * S.HV + i_h, tile, of_bias, maps, biases, S)
                maps, biases = load_both(memory, i_next * S.HV + i_h, tile, of_bias, S)
                i_n = i_next
        if noted is not None:
            store_both(noted, i, tile, of_bias, maps, biases, S)
        b_x, b_y = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
        b_v = load_tile(v, i, o_s, o_v, S.T, S.V)
        b_at = applied(b_x, Map(maps.A, biases.A))
        # The form with a norm, in which K = V, reads the key beside the value.
        b_key = b_x if S.NORM else b_v
        b_g = loss_gradient(b_at, b_key, b_v, norm, S)
        b_pair = product(b_y, tl.trans(b_x)) + S.BIAS
        b_z = load_column(rows, i, 0, o_s, S.T) * applied(b_y, Map(maps.W, biases.W))
        b_z += load_column(rows, i, 1, o_s, S.T) * applied(b_y, Map(maps.M, biases.M))
        b_z -= product(b_pair * load_tile(writes, i, o_s, o_s, S.T, S.T), b_g)
        store_tile(z, b_z, i, o_s, o_v, S.T, S.V)
        of_W = written(b_g * load_column(rows, i, 2, o_s, S.T), b_x, S.BIAS)
        of_M = written(b_g * load_column(rows, i, 3, o_s, S.T), b_x, S.BIAS)
        b_a, b_b = tl.load(scalars + i * 4), tl.load(scalars + i * 4 + 1)
        b_c, b_d = tl.load(scalars + i * 4 + 2), tl.load(scalars + i * 4 + 3)
        ends = network.is_full(full, i_m, i_r, R)
        maps = moved(b_a, b_b, b_c, b_d, ends, maps, of_W.weights, of_M.weights)
        biases = moved(b_a, b_b, b_c, b_d, ends, biases, of_W.bias, of_M.bias)
    store_both(memory, i_n * S.HV + i_h, tile, of_bias, maps, biases, S)
