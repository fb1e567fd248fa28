"""A linear memory through its mini-batches, forward: one program for each row and head.

    g_i = d loss / dz at z = A x_i
    z_t = kept_t W y_t + momentum_t M y_t - sum_i R_ti (x_i . y_t) g_i
    W <- a W + b M - sum_i w_i g_i x_i^T        M <- c W + d M - sum_i u_i g_i x_i^T
    A <- W at the end of a full mini-batch

with keys x and queries y; a bias is one more channel of both, of ones. W, M and A stay in registers
from the first mini-batch to the last. Every product is of few rows, and nothing is pipelined: each
has ended before the next instruction reads what it gave.
"""

import triton
import triton.language as tl

from deltarule.ops.memory.triton.memory import (
    Map,
    Maps,
    applied,
    load_column,
    load_maps,
    load_norm,
    load_tile,
    loss_gradient,
    product,
    store_maps,
    store_tile,
    written,
)


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
    m_v = (o_v < S.V)[None, :]
    b_weight, b_bias = load_norm(weight, bias, i_h, o_v, S.V, S.NORM)
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
        b_g = loss_gradient(b_at, b_key, b_v, b_weight, b_bias, m_v, eps, S.V, S.NORM)
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
    """a W + b M without what is written."""
    b_map = b_a * maps.W.weights + b_b * maps.M.weights - of_map.weights
    return Map(b_map, b_a * maps.W.bias + b_b * maps.M.bias - of_map.bias)
