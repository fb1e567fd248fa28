"""sLSTM on a GPU: a program takes 16 sequences of one head through all their tokens.

    i, f, z, o = gates_t + R h_{t-1}
    c = f' c + i' tanh(z)        n = f' n + i'        h = sigmoid(o) c / n

c, n and m stay in registers. h goes through memory, from which the products with R read it in
slices, because R of one head (4 D D numbers) fits neither registers nor shared memory. The backward
is given all gates, and puts their gradients in their place.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.named import launch
from deltarule.ops.slstm.inputs import SLSTMInputs
from deltarule.ops.slstm.triton import cell
from deltarule.ops.slstm.triton.cell import PRECISION, ROWS

# Channels that a product takes at once.
SLICE = 32


@triton.jit
def product(b_sum, p_x, m_x, p_y, o_d, C: tl.constexpr, D: tl.constexpr, BS: tl.constexpr):
    """b_sum + x y of x [rows at p_x, C] and y [C, D]."""
    for i in range(0, C, BS):
        o_s = i + tl.arange(0, BS)
        b_x = tl.load(
            p_x[:, None] + o_s[None, :], mask=m_x[:, None] & (o_s < C)[None, :], other=0.0
        )
        mask = (o_s < C)[:, None] & (o_d < D)[None, :]
        b_y = tl.load(p_y + o_s[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        b_sum += tl.dot(b_x, b_y.to(tl.float32), input_precision=PRECISION)
    return b_sum


@triton.jit(do_not_specialize=["N"])
def slstm_forward_kernel(
    gates, weights, start, length, before, o, final, states, scratch, N,
    H: tl.constexpr, D: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """o, the last state, with `states` all of them; weights [H, 4, D, D] are R^T of each gate."""
    i_h, o_d = tl.program_id(1), tl.arange(0, BD)
    rows = cell.rows_of_program(start, length, N, i_h, o_d, H, D, BB)
    m_n, first, tokens, mask, p_state = rows
    b_h, b_c, b_n, b_m = cell.load_four(before, p_state, mask, D)
    p_h = scratch + (tl.program_id(0) * BB + tl.arange(0, BB)).to(tl.int64) * H * D + i_h * D
    p_w = weights + i_h * 4 * D * D
    for t in range(tl.max(tokens)):
        # All have read what is overwritten; then all see what was written.
        tl.debug_barrier()
        tl.store(p_h[:, None] + o_d[None, :], b_h, mask=(o_d < D)[None, :])
        tl.debug_barrier()
        here = (t < tokens)[:, None] & mask
        row = (first + t) * H + i_h
        place = (row * 4 * D)[:, None] + o_d[None, :]
        b_i, b_f, b_z, b_o = cell.load_four(gates, place, here, D)
        b_i = product(b_i, p_h, m_n, p_w, o_d, D, D, BS)
        b_f = product(b_f, p_h, m_n, p_w + D * D, o_d, D, D, BS)
        b_z = product(b_z, p_h, m_n, p_w + 2 * D * D, o_d, D, D, BS)
        b_o = product(b_o, p_h, m_n, p_w + 3 * D * D, o_d, D, D, BS)
        b_h, b_c, b_n, b_m = cell.step(b_i, b_f, b_z, b_o, b_h, b_c, b_n, b_m, here)
        tl.store(o + (row * D)[:, None] + o_d[None, :], b_h, mask=here)
        if states is not None:
            cell.store_four(states, place, here, b_h, b_c, b_n, b_m, D)
    cell.store_four(final, p_state, mask, b_h, b_c, b_n, b_m, D)


@triton.jit(do_not_specialize=["N"])
def slstm_backward_kernel(
    raw, weights, start, length, before, states, d_o, d_final, d_before, N,
    H: tl.constexpr, D: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Gradients in the place of the gates, and by the state before; weights [H, 4 D, D] are R."""
    i_h, o_d = tl.program_id(1), tl.arange(0, BD)
    rows = cell.rows_of_program(start, length, N, i_h, o_d, H, D, BB)
    m_n, first, tokens, mask, p_state = rows
    b_dh, b_dc, b_dn, _ = cell.load_four(d_final, p_state, mask, D)
    p_w = weights + i_h * 4 * D * D
    for s in range(tl.max(tokens)):
        t = tokens - 1 - s
        here = (t >= 0)[:, None] & mask
        row = (first + tl.maximum(t, 0)) * H + i_h
        place = (row * 4 * D)[:, None] + o_d[None, :]
        b_gates = cell.load_four(raw, place, here, D)
        b_states = cell.states_of(states, before, p_state, place, t, here, H, D)
        b_d = b_dh + tl.load(d_o + (row * D)[:, None] + o_d[None, :], mask=here, other=0.0)
        b_di, b_df, b_dz, b_do, b_dc, b_dn = cell.step_back(
            b_gates, b_states, b_d, b_dc, b_dn, here
        )
        cell.store_four(raw, place, here, b_di, b_df, b_dz, b_do, D)
        tl.debug_barrier()
        b_back = tl.zeros([BB, BD], tl.float32)
        b_back = product(b_back, raw + row * 4 * D, m_n & (t >= 0), p_w, o_d, 4 * D, D, BS)
        b_dh = tl.where(here, b_back, b_dh)
    cell.store_four(d_before, p_state, mask, b_dh, b_dc, b_dn, tl.zeros([BB, BD], tl.float32), D)


def forward(inputs: SLSTMInputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _, size = inputs.gates.shape
    final = torch.empty_like(inputs.before)
    o = torch.zeros_like(inputs.gates[:, :, :, 0], memory_format=torch.contiguous_format)
    # Zeros, where padding is: the backward multiplies with them.
    states = inputs.before.new_zeros(batch * tokens if save else 0, heads, 4, size)
    if batch * tokens == 0:
        return o, inputs.before.clone(), states
    scratch = final.new_empty(-(-len(final) // ROWS) * ROWS, heads, size)
    values: dict[str, Any] = {"gates": inputs.gates.contiguous(), "scratch": scratch}
    values |= {"weights": inputs.recurrent.mT.contiguous()}
    values |= {"o": o, "final": final, "states": states if save else None}
    run(slstm_forward_kernel, inputs, values)
    return o, final, states


def backward(
    d_o: Tensor, d_final: Tensor, inputs: SLSTMInputs, raw: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    if not raw.numel():
        return raw, d_final.clone()
    d_before = torch.empty_like(inputs.before)
    values = {"raw": raw, "weights": inputs.recurrent.contiguous(), "states": states}
    values |= {"d_o": d_o.contiguous(), "d_final": d_final.contiguous(), "d_before": d_before}
    run(slstm_backward_kernel, inputs, values)
    return raw, d_before


def run(kernel: object, inputs: SLSTMInputs, values: dict[str, Any]) -> None:
    heads, _, size = inputs.gates.shape[2:]
    sequences, block = len(inputs.before), max(triton.next_power_of_2(size), 16)
    start, length = inputs.spans
    values |= {"start": start, "length": length, "before": inputs.before.contiguous()}
    values |= {"N": sequences, "H": heads, "D": size, "BB": ROWS, "BD": block}
    values |= {"BS": min(SLICE, block), "num_stages": 1, "num_warps": 8 if block > 64 else 4}
    launch(kernel, (-(-sequences // ROWS), heads, 1), values)
