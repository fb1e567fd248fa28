"""sLSTM on a GPU, the channels of a head split over programs that hold their rows of R.

    i, f, z, o = gates_t + R h_{t-1}        for the channels of a program, of all h
    d_h = sum over programs of R^T d_gates

A program keeps c, n and m of its channels in registers, and what R has for them in the memory of
its multiprocessor. After each token it hands on its part of h, or of d_h, and waits until all
programs of its head have. They must run at the same time, so all are launched together or not at
all. In the interpreter, where they run in turns, each token is a launch of its own, and none waits.
"""

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.launch import multiprocessors
from deltarule.ops.runtime.named import launch
from deltarule.ops.slstm.inputs import SLSTMInputs
from deltarule.ops.slstm.triton import cell
from deltarule.ops.slstm.triton.cell import PRECISION, ROWS

# Numbers of R for one gate that a program holds, and the bytes that it takes for those of all four,
# split in two for tf32, and for h.
HELD, SHARED = 4096, 144 * 1024
WARPS = 8
# Whether calls are split in the interpreter, too, with a launch for each token.
IN_TURNS = False


@triton.jit
def hand_on(p_count, TOGETHER: tl.constexpr):
    """Say that all threads of this program have written."""
    tl.debug_barrier()
    if TOGETHER:
        tl.atomic_add(p_count, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(p_count, count, TOGETHER: tl.constexpr):
    """Wait until so many programs have handed on, and see what they wrote."""
    if TOGETHER:
        while tl.atomic_add(p_count, 0, sem="acquire", scope="gpu") < count:
            pass


@triton.jit
def four_of(b_x, BB: tl.constexpr, BW: tl.constexpr):
    """Columns of i, z, f and o in turns, to the four of them."""
    b_if, b_zo = tl.split(tl.reshape(b_x, [BB, BW, 2, 2]))
    b_i, b_f = tl.split(b_if)
    b_z, b_o = tl.split(b_zo)
    return b_i, b_f, b_z, b_o


@triton.jit(do_not_specialize=["N", "begin", "end"])
def split_forward_kernel(
    gates, weights, start, length, o, final, states, passed, count, N, begin, end,
    H: tl.constexpr, D: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Tokens from begin to end; `final` has the state before and gets the one after.

    passed [2, programs' rows, H, D] has h before token t in its half t % 2.
    """
    i_h, i_w, o_e = tl.program_id(1), tl.program_id(2), tl.arange(0, BD)
    o_d = i_w * BW + tl.arange(0, BW)
    rows = cell.rows_of_program(start, length, N, i_h, o_d, H, D, BB)
    _, first, tokens, mask, p_state = rows
    b_h, b_c, b_n, b_m = cell.load_four(final, p_state, mask, D)
    o_row = tl.program_id(0) * BB + tl.arange(0, BB)
    p_h, half = passed + (o_row * H + i_h) * D, tl.num_programs(0) * BB * H * D
    p_count = count + tl.program_id(0) * H + i_h
    # Column 4 c + 2 a + b is gate a + 2 b of channel c.
    o_j = tl.arange(0, 4 * BW)
    o_r = i_h * 4 * D + ((o_j // 2) % 2 + 2 * (o_j % 2)) * D + i_w * BW + o_j // 4
    m_w = (o_e < D)[:, None] & (i_w * BW + o_j // 4 < D)[None, :]
    b_w = tl.load(weights + o_r[None, :] * D + o_e[:, None], mask=m_w, other=0.0).to(tl.float32)
    for t in range(begin, tl.minimum(end, tl.max(tokens).to(tl.int32))):
        here = (t < tokens)[:, None] & mask
        row = (first + t) * H + i_h
        place = (row * 4 * D)[:, None] + o_d[None, :]
        b_i, b_f, b_z, b_o = cell.load_four(gates, place, here, D)
        wait_for(p_count, (t - begin) * PARTS, TOGETHER)
        p_x = (p_h + (t % 2) * half)[:, None] + o_e[None, :]
        b_x = tl.load(p_x, mask=(o_e < D)[None, :], other=0.0)
        b_seen = tl.dot(b_x, b_w, input_precision=PRECISION)
        b_ri, b_rf, b_rz, b_ro = four_of(b_seen, BB, BW)
        b_i, b_f, b_z, b_o = b_i + b_ri, b_f + b_rf, b_z + b_rz, b_o + b_ro
        b_h, b_c, b_n, b_m = cell.step(b_i, b_f, b_z, b_o, b_h, b_c, b_n, b_m, here)
        p_next = (p_h + ((t + 1) % 2) * half)[:, None] + o_d[None, :]
        tl.store(p_next, b_h, mask=(o_d < D)[None, :])
        hand_on(p_count, TOGETHER)
        tl.store(o + (row * D)[:, None] + o_d[None, :], b_h, mask=here)
        if states is not None:
            cell.store_four(states, place, here, b_h, b_c, b_n, b_m, D)
    cell.store_four(final, p_state, mask, b_h, b_c, b_n, b_m, D)


@triton.jit
def rows_of_weights(weights, i_h, gate: tl.constexpr, o_d, o_e, D: tl.constexpr):
    place = ((i_h * 4 + gate) * D + o_d)[:, None] * D + o_e[None, :]
    mask = (o_d < D)[:, None] & (o_e < D)[None, :]
    return tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["N", "begin", "end"])
def split_backward_kernel(
    raw, weights, start, length, before, states, d_o, d_before, passed, count, N, begin, end,
    H: tl.constexpr, D: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Gradients in the place of the gates; `d_before` has those by the state after, gets those
    by the state before.

    Step s is the token s before the last of each row; one more step than tokens adds up the last
    parts. passed [2, programs of a head, programs' rows, H, D] has the parts of step s in s % 2.
    """
    i_h, i_w, o_e = tl.program_id(1), tl.program_id(2), tl.arange(0, BD)
    o_d = i_w * BW + tl.arange(0, BW)
    rows = cell.rows_of_program(start, length, N, i_h, o_d, H, D, BB)
    _, first, tokens, mask, p_state = rows
    b_dh, b_dc, b_dn, b_0 = cell.load_four(d_before, p_state, mask, D)
    o_row = tl.program_id(0) * BB + tl.arange(0, BB)
    p_row, part = passed + (o_row * H + i_h) * D, tl.num_programs(0) * BB * H * D
    p_count = count + tl.program_id(0) * H + i_h
    b_wi = rows_of_weights(weights, i_h, 0, o_d, o_e, D)
    b_wf = rows_of_weights(weights, i_h, 1, o_d, o_e, D)
    b_wz = rows_of_weights(weights, i_h, 2, o_d, o_e, D)
    b_wo = rows_of_weights(weights, i_h, 3, o_d, o_e, D)
    for s in range(begin, tl.minimum(end, tl.max(tokens).to(tl.int32) + 1)):
        t = tokens - 1 - s
        here = (t >= 0)[:, None] & mask
        row = (first + tl.maximum(t, 0)) * H + i_h
        place = (row * 4 * D)[:, None] + o_d[None, :]
        b_gates = cell.load_four(raw, place, here, D)
        b_states = cell.states_of(states, before, p_state, place, t, here, H, D)
        b_d = tl.load(d_o + (row * D)[:, None] + o_d[None, :], mask=here, other=0.0)
        wait_for(p_count, (s - begin) * PARTS, TOGETHER)
        if s > 0:
            p_part = (p_row + ((s + 1) % 2) * PARTS * part)[:, None] + o_d[None, :]
            b_sum = tl.zeros([BB, BW], tl.float32)
            for i in tl.static_range(PARTS):
                b_sum += tl.load(p_part + i * part, mask=(o_d < D)[None, :], other=0.0)
            b_dh = tl.where((t >= -1)[:, None], b_sum, b_dh)
        b_di, b_df, b_dz, b_do, b_dc, b_dn = cell.step_back(
            b_gates, b_states, b_d + b_dh, b_dc, b_dn, here
        )
        b_back = tl.dot(b_di, b_wi, input_precision=PRECISION)
        b_back = tl.dot(b_df, b_wf, b_back, input_precision=PRECISION)
        b_back = tl.dot(b_dz, b_wz, b_back, input_precision=PRECISION)
        b_back = tl.dot(b_do, b_wo, b_back, input_precision=PRECISION)
        p_part = (p_row + ((s % 2) * PARTS + i_w) * part)[:, None] + o_e[None, :]
        tl.store(p_part, b_back, mask=(o_e < D)[None, :])
        hand_on(p_count, TOGETHER)
        cell.store_four(raw, place, here, b_di, b_df, b_dz, b_do, D)
    cell.store_four(d_before, p_state, mask, b_dh, b_dc, b_dn, b_0, D)


def channels_of_program(size: int) -> int:
    """Channels of a head of `size` that one program computes."""
    block = triton.next_power_of_2(max(size, 16))
    return min(block, max(HELD // block, 16))


def programs(inputs: SLSTMInputs) -> tuple[int, int, int]:
    """Of 16 sequences each, of heads, and of parts of a head."""
    heads, _, size = inputs.gates.shape[2:]
    parts = triton.cdiv(size, channels_of_program(size))
    return triton.cdiv(len(inputs.before), ROWS), heads, parts


def takes(inputs: SLSTMInputs) -> bool:
    """Whether a call is split: where all programs find a multiprocessor, and R its memory."""
    device = inputs.gates.device
    if inputs.gates.numel() == 0:
        return False
    if device.type != "cuda":
        return IN_TURNS
    gpu = torch.cuda.get_device_properties(device)
    # Of a block, where it asks for more than all GPUs have.
    held: int = getattr(gpu, "shared_memory_per_block_optin", 0)
    return held >= SHARED and math.prod(programs(inputs)) <= multiprocessors(device)


def forward(inputs: SLSTMInputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _, size = inputs.gates.shape
    final = inputs.before.clone(memory_format=torch.contiguous_format)
    o = torch.zeros_like(inputs.gates[:, :, :, 0], memory_format=torch.contiguous_format)
    states = inputs.before.new_zeros(batch * tokens if save else 0, heads, 4, size)
    passed = final.new_zeros(2, programs(inputs)[0] * ROWS, heads, size)
    passed[0, : len(final)] = final[:, :, 0]
    values = {"gates": inputs.gates.contiguous(), "o": o, "states": states if save else None}
    values |= {"weights": inputs.recurrent.contiguous(), "final": final, "passed": passed}
    run(split_forward_kernel, inputs, values, tokens)
    return o, final, states


def backward(
    d_o: Tensor, d_final: Tensor, inputs: SLSTMInputs, raw: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    d_before = d_final.clone(memory_format=torch.contiguous_format)
    d_before[:, :, 3] = 0
    (rows, heads, parts), size = programs(inputs), raw.shape[-1]
    passed = d_before.new_empty(2, parts, rows * ROWS, heads, size)
    values = {"raw": raw, "states": states, "d_o": d_o.contiguous(), "d_before": d_before}
    values |= {"weights": inputs.recurrent.contiguous(), "passed": passed}
    run(split_backward_kernel, inputs, values, inputs.gates.shape[1] + 1)
    return raw, d_before


def run(kernel: object, inputs: SLSTMInputs, values: dict[str, Any], steps: int) -> None:
    """Launch all programs at once for all steps, or step by step where they run in turns."""
    grid, size = programs(inputs), inputs.gates.shape[-1]
    at_once = multiprocessors(inputs.gates.device) > 1
    together = at_once and grid[2] > 1
    start, length = inputs.spans
    count = torch.zeros(grid[:2], dtype=torch.int32, device=inputs.gates.device)
    values |= {"start": start, "length": length, "before": inputs.before.contiguous()}
    values |= {"count": count, "N": len(inputs.before), "H": grid[1], "D": size, "BB": ROWS}
    values |= {"BD": max(triton.next_power_of_2(size), 16), "BW": channels_of_program(size)}
    values |= {"PARTS": grid[2], "TOGETHER": together, "num_warps": WARPS}
    values |= {"num_stages": 1, "launch_cooperative_grid": together}
    for begin, end in [(0, steps)] if at_once else itertools.pairwise(range(steps + 1)):
        launch(kernel, grid, values | {"begin": begin, "end": end})
