"""A memory of one or two maps through its mini-batches, forward, its maps streamed from the cache.

The equations, and what is moved, are in network.py; nothing is pipelined, as in scan.py.
"""

import triton
import triton.language as tl

from deltarule.ops.memory.triton.memory import (
    load_column,
    load_norm,
    load_tile,
    loss_gradient,
    product,
    store_tile,
    written,
)
from deltarule.ops.memory.triton.network import (
    first_map,
    first_tile,
    gelu,
    is_full,
    is_last,
    is_settled,
    last_bias,
    last_tile,
    load_parts,
    read_tile,
    row_of,
    trained,
)


@triton.jit
def store_parts(
    memory, i, o, mask, b_W, b_M, b_A, keeps_M, keeps_A, SIZE: tl.constexpr, PARTS: tl.constexpr
):
    """A tile of W, and of M and A where they will be read."""
    p_x = memory + i * (PARTS * SIZE) + o
    tl.store(p_x, b_W, mask=mask)
    tl.store(p_x + SIZE, b_M, mask=mask & keeps_M)
    if PARTS == 3:
        tl.store(p_x + 2 * SIZE, b_A, mask=mask & keeps_A)


@triton.jit
def move_on(
    memory, noted, i_n, i, o, mask, b_W, b_M, b_A, b_of_W, b_of_M, scalars, settled, ends, last,
    SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Note a tile of W, M and A, and store what it is after the mini-batch."""
    b_next = tl.load(scalars + i * 4) * b_W + tl.load(scalars + i * 4 + 1) * b_M - b_of_W
    b_next_M = tl.load(scalars + i * 4 + 2) * b_W + tl.load(scalars + i * 4 + 3) * b_M - b_of_M
    b_next_A = tl.where(ends, b_next, b_A)
    begins, goes_on = settled == 0, ends == 0
    # All have read what is overwritten.
    tl.debug_barrier()
    if noted is not None:
        store_parts(noted, i, o, mask, b_W, b_M, b_A, begins | (PARTS == 3), begins, SIZE, PARTS)
    keeps_M, keeps_A = last | goes_on | (PARTS == 3), last | (settled & goes_on)
    store_parts(
        memory, i_n, o, mask, b_next, b_next_M, b_next_A, keeps_M, keeps_A, SIZE, PARTS
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "R"])
def network_scan_kernel(
    q, k, v, rows, scalars, writes, full, owner, memory, weight, bias, z, noted, eps, M, R,
    HV: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, DEEP: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """z, and `memory` in place; with `noted` also what it is before each mini-batch.

    rows [M, R, HV, 4, S] are kept, momentum, w and u; scalars [M, R, HV, 4] are a, b, c and d.
    """
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, BS), tl.arange(0, BK), tl.arange(0, BV)
    b_weight, b_bias = load_norm(weight, bias, i_h, o_v, V, NORM)
    o_b, m_b = last_bias(o_v, V, C, K, DEEP, BIAS)
    for i_m in range(M):
        i = (i_m * R + i_r) * HV + i_h
        i_n = row_of(owner, i_m, i_r, R, PACKED) * HV + i_h
        settled = is_settled(full, owner, i_m, i_r, R, PACKED)
        ends, last = is_full(full, i_m, i_r, R), is_last(owner, i_m, i_r, M, R, PACKED)
        # The network on the keys, and the gradient of the loss.
        b_at = trained(
            memory, k, i_n, i, settled, o_s, o_k, o_v, S, K, V, C, BS, BV, BC, SIZE, PARTS, DEEP,
            BIAS,
        )  # fmt: skip
        b_v = load_tile(v, i, o_s, o_v, S, V)
        # The form with a norm, in which K = V, reads the key beside the value.
        b_key = load_tile(k, i, o_s, o_v, S, K) if NORM else b_v
        m_v = (o_v < V)[None, :]
        b_g = loss_gradient(b_at, b_key, b_v, b_weight, b_bias, m_v, eps, V, NORM)
        # The network on the queries, and what the maps become.
        b_kept, b_momentum = load_column(rows, i, 0, o_s, S), load_column(rows, i, 1, o_s, S)
        b_w, b_u = load_column(rows, i, 2, o_s, S), load_column(rows, i, 3, o_s, S)
        b_Wb, b_Mb, b_Ab = load_parts(memory, i_n, o_b, m_b, settled, SIZE, PARTS)
        b_z = b_kept * b_Wb + b_momentum * b_Mb
        b_of_Wb, b_of_Mb = tl.sum(b_w * b_g, axis=0)[None, :], tl.sum(b_u * b_g, axis=0)[None, :]
        move_on(
            memory, noted, i_n, i, o_b, m_b, b_Wb, b_Mb, b_Ab, b_of_Wb, b_of_Mb, scalars,
            settled, ends, last, SIZE, PARTS,
        )  # fmt: skip
        b_R = load_tile(writes, i, o_s, o_s, S, S)
        b_N = b_R
        if DEEP:
            b_k, b_q = load_tile(k, i, o_s, o_k, S, K), load_tile(q, i, o_s, o_k, S, K)
            b_N = (product(b_q, tl.trans(b_k)) + BIAS) * b_R
        b_pair = tl.zeros([BS, BS], tl.float32) + BIAS
        # A tile that is read again in each block fills no registers between products.
        store_tile(z, b_g, i, o_s, o_v, S, V)
        tl.debug_barrier()
        for c in range(0, C, BC):
            o_c = c + tl.arange(0, BC)
            b_g = load_tile(z, i, o_s, o_v, S, V)
            o, mask = last_tile(o_v, o_c, V, C, K, DEEP, BIAS)
            b_W, b_M, b_A = load_parts(memory, i_n, o, mask, settled, SIZE, PARTS)
            if DEEP:
                b_x, b_y = through_first_map(
                    memory, noted, k, q, b_N, product(b_g, b_A), b_kept, b_momentum, b_w, b_u,
                    scalars, i_n, i, settled, ends, last, o_s, o_c, o_k, S, C, K, BIAS, SIZE, PARTS,
                )  # fmt: skip
            else:
                b_x, b_y = load_tile(k, i, o_s, o_c, S, K), load_tile(q, i, o_s, o_c, S, K)
            b_pair += product(b_y, tl.trans(b_x))
            b_z += read_tile(b_y, b_W, b_M, b_kept, b_momentum, settled, PARTS)
            b_of_W, _ = written(b_w * b_g, b_x, BIAS)
            b_of_M, _ = written(b_u * b_g, b_x, BIAS)
            move_on(
                memory, noted, i_n, i, o, mask, b_W, b_M, b_A, b_of_W, b_of_M, scalars,
                settled, ends, last, SIZE, PARTS,
            )  # fmt: skip
        b_z -= product(b_pair * b_R, load_tile(z, i, o_s, o_v, S, V))
        tl.debug_barrier()
        store_tile(z, b_z, i, o_s, o_v, S, V)
        # What is stored is read by other threads.
        tl.debug_barrier()


@triton.jit
def through_first_map(
    memory, noted, k, q, b_N, b_t, b_kept, b_momentum, b_w, b_u, scalars,
    i_n, i, settled, ends, last, o_s, o_c, o_k,
    S: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """x and y of channels o_c, from t = A^T g there; the rows of the first map move on."""
    o, mask, o_b, m_b = first_tile(o_c, o_k, C, K, BIAS)
    b_at, b_g, b_u1, b_W, b_M, b_A, b_Wb, b_Mb, b_Ab = first_map(
        memory, k, q, b_t, b_N, b_kept, b_momentum, i_n, i, settled, o_s, o_c, o_k,
        S, C, K, BIAS, SIZE, PARTS,
    )  # fmt: skip
    b_k = load_tile(k, i, o_s, o_k, S, K)
    b_of_W, b_of_Wb = written(b_w * b_g, b_k, BIAS)
    b_of_M, b_of_Mb = written(b_u * b_g, b_k, BIAS)
    move_on(
        memory, noted, i_n, i, o, mask, b_W, b_M, b_A, b_of_W, b_of_M, scalars,
        settled, ends, last, SIZE, PARTS,
    )  # fmt: skip
    move_on(
        memory, noted, i_n, i, o_b, m_b, b_Wb, b_Mb, b_Ab, b_of_Wb, b_of_Mb, scalars,
        settled, ends, last, SIZE, PARTS,
    )  # fmt: skip
    return gelu(b_at), gelu(b_u1)
