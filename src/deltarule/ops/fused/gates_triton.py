"""The maps from gate logits to decays and write strengths, and their gradients, in float32.

    dt = softplus(logits + dt_bias)        log_decay = -exp(A_log) * dt
    beta = beta_max * sigmoid(logits)

A row holds the C channels of one token: a channel for each head, or K for each head.
"""

from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.gates import Gates, LogDecay, WriteStrength
from deltarule.ops.fused.parts_triton import sums_of_parts
from deltarule.ops.fused_kernels import adjacent, as_rows
from deltarule.ops.registration import Backward, Gradients
from deltarule.ops.runtime.launch import Grid
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.replay import Recorded
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Elements of a tile: a thread that holds several rows computes a channel's rate once for them. Most
# channels in one, and in the backward tiles of one program.
DECAY_TILE, TILE, CHANNELS, TILES = 4096, 1024, 256, 8
# Programs that the backward has at least, if there are as many tiles.
PROGRAMS = 256
OPTIONS = {"num_stages": 1, "num_warps": 4}


@triton.jit
def softplus(b_x):
    """max(x, 0) + log(1 + e), e = exp(-|x|), and its derivative sigmoid(x).

    log(1 + e) = 2 atanh(e / (2 + e)) by its series, whose argument is at most 1/3: exact to
    float32 for small e too, where a logarithm of 1 + e loses every digit.
    """
    b_e = tl.exp(-tl.abs(b_x))
    b_s = b_e / (2 + b_e)
    b_q = b_s * b_s
    b_sum = tl.full(b_q.shape, 1 / 15, tl.float32)
    for i in tl.static_range(7):
        b_sum = b_sum * b_q + 1 / (13 - 2 * i)
    b_slope = tl.where(b_x >= 0, 1.0, b_e) / (1 + b_e)
    return tl.maximum(b_x, 0.0) + 2 * b_s * b_sum, b_slope


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def log_decay_kernel(
    logits, A_log, dt_bias, log_decay, dt, rows, s_row,
    C: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    m = (r < rows)[:, None] & m_c[None, :]
    b_x = tl.load(logits + r[:, None] * s_row + o_c[None, :], mask=m, other=0.0).to(tl.float32)
    b_bias = tl.load(dt_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_rate = tl.exp(tl.load(A_log + o_c // K, mask=m_c, other=0.0).to(tl.float32))
    b_dt, _ = softplus(b_x + b_bias[None, :])
    tl.store(log_decay + r[:, None] * C + o_c[None, :], -b_rate[None, :] * b_dt, mask=m)
    if STEP:
        tl.store(dt + r[:, None] * C + o_c[None, :], b_dt, mask=m)


@triton.jit(do_not_specialize=["rows"])
def log_decay_backward_kernel(
    d_log_decay, d_dt, logits, A_log, dt_bias, d_logits, d_A_log, d_dt_bias, rows, s_row,
    C: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr,
    DECAY: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """d dt = d dt - exp(A_log) d log_decay        d logits = sigmoid(logits + dt_bias) d dt."""
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    b_bias = tl.load(dt_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_rate = tl.exp(tl.load(A_log + o_c // K, mask=m_c, other=0.0).to(tl.float32))[None, :]
    b_dA, b_dbias = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BR + tl.arange(0, BR)
        m = (r < rows)[:, None] & m_c[None, :]
        o_row = r[:, None] * C + o_c[None, :]
        p_x = logits + r[:, None] * s_row + o_c[None, :]
        b_dt, b_slope = softplus(tl.load(p_x, mask=m, other=0.0).to(tl.float32) + b_bias)
        b_ddt = tl.zeros([BR, BC], tl.float32)
        if STEP:
            b_ddt += tl.load(d_dt + o_row, mask=m, other=0.0)
        if DECAY:
            b_part = -b_rate * tl.load(d_log_decay + o_row, mask=m, other=0.0)
            b_ddt += b_part
            b_dA += b_part * b_dt
        b_dx = b_ddt * b_slope
        b_dbias += b_dx
        tl.store(d_logits + o_row, b_dx.to(d_logits.dtype.element_ty), mask=m)
    o_part = tl.program_id(0) * C + o_c
    tl.store(d_A_log + o_part, tl.sum(b_dA, axis=0), mask=m_c)
    tl.store(d_dt_bias + o_part, tl.sum(b_dbias, axis=0), mask=m_c)


@triton.jit(do_not_specialize=["rows"])
def write_strength_kernel(
    logits, d_beta, out, rows, beta_max, s_row,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """beta, or in the backward d logits = beta_max s (1 - s) d beta with s = sigmoid(logits)."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m = (r < rows)[:, None] & (o_c < C)[None, :]
    o_row = r[:, None] * C + o_c[None, :]
    b_x = tl.load(logits + r[:, None] * s_row + o_c[None, :], mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(b_x)
    b_out = beta_max * b_s
    if BACKWARD:
        # 1 - s as a sigmoid too: nothing cancels where s is near one.
        b_out *= tl.sigmoid(-b_x) * tl.load(d_beta + o_row, mask=m, other=0.0)
    tl.store(out + o_row, b_out.to(out.dtype.element_ty), mask=m)


def log_decay(inputs: LogDecay) -> tuple[Tensor, Tensor]:
    out, dt = decays(inputs)
    return out, out.new_empty(0) if dt is None else dt


@Recorded
def decays(inputs: LogDecay) -> tuple[Tensor, Tensor | None]:
    shape, device = inputs.logits.shape, inputs.logits.device
    out = torch.empty(shape, dtype=torch.float32, device=device)
    dt = torch.empty(shape, dtype=torch.float32, device=device) if inputs.step else None
    if out.numel():
        values, grid = arguments(inputs.logits, inputs.dt_bias.ndim, DECAY_TILE)
        values |= parameters_of(inputs) | {"log_decay": out, "dt": out if dt is None else dt}
        launch(log_decay_kernel, grid, values | {"STEP": inputs.step})
    return out, dt


def log_decay_backward(given: Backward[LogDecay]) -> Gradients:
    d_log_decay, d_dt = given.gradients
    d_dt = d_dt if given.inputs.step else None
    d_both = (None if x is None else x.contiguous() for x in (d_log_decay, d_dt))
    return log_decay_gradients(given.inputs, *d_both)


@Recorded
def log_decay_gradients(
    inputs: LogDecay, d_log_decay: Tensor | None, d_dt: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    logits, A_log, dt_bias, _ = inputs
    values, (_, columns, _) = arguments(logits, dt_bias.ndim, TILE)
    # Few channels make few tiles: rather a program for each than one that goes through all.
    tiles = min(TILES, max(1, power_of_2(cdiv(values["rows"], values["BR"] * PROGRAMS))))
    programs = cdiv(values["rows"], values["BR"] * tiles)
    d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    d_rates, d_bias = (
        torch.empty(programs, dt_bias.numel(), dtype=torch.float32, device=logits.device)
        for _ in range(2)
    )
    if d_bias.numel():
        values |= {"d_log_decay": d_log_decay, "DECAY": d_log_decay is not None}
        values |= {"d_dt": d_dt, "STEP": d_dt is not None, "TILES": tiles}
        values |= {"d_logits": d_logits, "d_A_log": d_rates, "d_dt_bias": d_bias}
        launch(log_decay_backward_kernel, (programs, columns, 1), values | parameters_of(inputs))
    pairs = [(d_rates, A_log), (d_bias, dt_bias)]
    # The rate of a head has a part of each of its channels.
    together = [pairs] if A_log.numel() == dt_bias.numel() else [[pair] for pair in pairs]
    d_A_log, d_dt_bias = chain(*map(sums_of_parts, together))
    return d_logits, d_A_log, d_dt_bias


def write_strength(inputs: WriteStrength) -> tuple[Tensor]:
    found: tuple[Tensor] = strengths(inputs, None)
    return found


def write_strength_backward(given: Backward[WriteStrength]) -> Gradients:
    found: Gradients = strengths(given.inputs, *given.gradients)
    return found


@Recorded
def strengths(inputs: WriteStrength, d_beta: Tensor | None) -> tuple[Tensor]:
    """beta in float32, or with d_beta the gradient by logits in their dtype; like the logits."""
    logits, beta_max = inputs
    dtype = torch.float32 if d_beta is None else logits.dtype
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if out.numel():
        values, grid = arguments(logits, 1, TILE)
        values |= {"d_beta": None if d_beta is None else d_beta.contiguous(), "out": out}
        values |= {"beta_max": beta_max, "BACKWARD": d_beta is not None}
        launch(write_strength_kernel, grid, values)
    return (out,)


@Recorded
def gates(inputs: Gates) -> tuple[Tensor | None, ...]:
    decay, strength = inputs.parts
    return decays.run(decay)[0], *strengths.run(strength, None)


def gates_backward(given: Backward[Gates]) -> Gradients:
    inputs = given.inputs
    pairs = zip(given.gradients, (inputs.logits, inputs.beta_logits), strict=True)
    d_both = (
        torch.zeros_like(x, dtype=torch.float32) if d is None else d.contiguous() for d, x in pairs
    )
    return gates_gradients(inputs, *d_both)


@Recorded
def gates_gradients(inputs: Gates, d_log_decay: Tensor, d_beta: Tensor) -> Gradients:
    decay, strength = inputs.parts
    return *log_decay_gradients.run(decay, d_log_decay, None), *strengths.run(strength, d_beta)


def arguments(logits: Tensor, axes: int, elements: int) -> tuple[dict[str, Any], Grid]:
    """What all kernels are given of rows of logits, in tiles of so many elements; and a grid."""
    flat = adjacent(as_rows(logits, axes))
    rows, channels = flat.shape
    width = min(power_of_2(channels), CHANNELS)
    tile = elements // width
    # Rather the tensor that was given than a view of it: others may lie between its rows.
    given = logits if logits.data_ptr() == flat.data_ptr() else flat
    values = {**OPTIONS, "logits": given, "s_row": flat.stride(0), "rows": rows}
    values |= {"C": channels, "BC": width, "BR": tile}
    return values, (cdiv(rows, tile), cdiv(channels, width), 1)


def parameters_of(inputs: LogDecay) -> dict[str, Any]:
    """The rate of each head and the bias of each of its K channels."""
    A_log, dt_bias = inputs.A_log.contiguous(), inputs.dt_bias.contiguous()
    return {"A_log": A_log, "dt_bias": dt_bias, "K": dt_bias.numel() // A_log.numel()}
