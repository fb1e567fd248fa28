"""What the gradients of a chunk sum over its values, and dv: device functions.

gradients.py has the equations, and says why a tile in these loops is an operand and nothing else.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.decay_gradients import add_held, no_held
from deltarule.kernels.triton.tiles import (
    load_chunk,
    load_errors,
    load_rows,
    load_state,
    load_tile,
)


@triton.jit
def over_values(
    v, states, errors, d_o, d_states, d_errors, first, rows, i_h, i_kept, i_own, o_i, m_i, i_k,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    BT: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    HAS_DECAY: tl.constexpr, TIED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    WRITTEN: tl.constexpr,
):  # fmt: skip
    """dO w^T, X w^T, dO S, X S; and if they are WRITTEN here w D and what `add_held` adds up."""
    b_gp, b_gm = tl.zeros([BQ, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    b_read, b_row = tl.zeros([BQ, BC], tl.float32), tl.zeros([BT, BC], tl.float32)
    b_col, b_held = tl.zeros([BT, BC], tl.float32), no_held(BV, PRECISION)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = load_tile(d_o, first, i_h, i_v, o_i, m_i, o_v, HV, V, V % BV == 0, TMA)
        b_e = load_errors(
            v, errors, first * N_STEPS, rows, i_h, i_kept, i_v, HV, V, BT, BV, TIED, TMA
        )
        b_s = load_state(states, i_kept, i_v, i_k, K, V, BV, BC, TMA)
        if WRITTEN:
            b_d = load_state(d_states, i_own, i_v, i_k, K, V, BV, BC, TMA)
        b_gp = tl.dot(b_do, tl.trans(b_e), acc=b_gp, input_precision=PRECISION)
        b_read = tl.dot(b_do, b_s, acc=b_read, input_precision=PRECISION)
        if WRITTEN:
            b_col = tl.dot(b_e, b_d, acc=b_col, input_precision=PRECISION)
            if HAS_DECAY:
                b_held = add_held(b_held, b_d, b_s, PRECISION)
        if TIED:
            b_x = load_chunk(d_errors, i_own, i_v, V, BT, BV, TMA)
            b_gm = tl.dot(b_x, tl.trans(b_e), acc=b_gm, input_precision=PRECISION)
            b_row = tl.dot(b_x, b_s, acc=b_row, input_precision=PRECISION)
    return b_gp, b_gm, b_read, b_row, b_col, b_held


@triton.jit
def written_over_values(
    b_col, b_held, v, states, errors, d_states, first, rows, i_h, i_kept, i_own, i_k,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BV: tl.constexpr, HAS_DECAY: tl.constexpr, TIED: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """w D and <D, S> in a loop of their own: beside dq and dk of other heads the first has no
    registers left for them.
    """
    for i_v in range(0, V, BV):
        b_e = load_errors(
            v, errors, first * N_STEPS, rows, i_h, i_kept, i_v, HV, V, BT, BV, TIED, TMA
        )
        b_d = load_state(d_states, i_own, i_v, i_k, K, V, BV, BC, TMA)
        b_col = tl.dot(b_e, b_d, acc=b_col, input_precision=PRECISION)
        if HAS_DECAY:
            b_s = load_state(states, i_kept, i_v, i_k, K, V, BV, BC, TMA)
            b_held = add_held(b_held, b_d, b_s, PRECISION)
    return b_col, b_held


@triton.jit
def store_value_gradients(
    p_x, b_beta, p_dv, rows, i_c, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """dv = beta X of every SLICES-th tile of values from the i_c-th on."""
    o_r = tl.arange(0, BT)
    m_r = o_r < rows
    for i_v in tl.static_range(0, V, SLICES * BV):
        o_v = i_v + i_c * BV + tl.arange(0, BV)
        b_x = load_rows(p_x, o_r, m_r, o_v, V, V, V % (SLICES * BV) == 0)
        b_dv = (b_x.to(tl.float32) * b_beta[:, None]).to(p_dv.dtype.element_ty)
        p_tile = p_dv + o_r[:, None] * (HV * V) + o_v[None, :]
        tl.store(p_tile, b_dv, mask=m_r[:, None] & (o_v < V)[None, :])
