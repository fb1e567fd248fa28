"""Root-mean-square norm of each head, multiplied by an activated gate, and its gradient.

    n = x / sqrt(mean(x^2) + eps)        y = weight * n * activation(gate)

A row is one head of one token. Nothing but the inputs is kept for the backward: a row is read
whole anyway, and its norm costs less than reading it back.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.norms import GatedNorm, ResidualNorm
from deltarule.ops.fused.parts_triton import sum_of_parts
from deltarule.ops.fused_kernels import adjacent, as_rows
from deltarule.ops.registration import Backward, Gradients
from deltarule.ops.runtime.chained import begin, chained
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.replay import Recorded
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Elements of a tile, and in the backward tiles whose share of d weight one program adds up.
FORWARD_TILE, BACKWARD_TILE, TILES = 2048, 1024, 8


@triton.jit
def activate(b_gate, ACTIVATION: tl.constexpr):
    """SiLU or the sigmoid, and its derivative."""
    b_s = tl.sigmoid(b_gate)
    if ACTIVATION == "silu":
        b_value, b_slope = b_gate * b_s, b_s * (1 + b_gate * (1 - b_s))
    else:
        b_value, b_slope = b_s, b_s * (1 - b_s)
    return b_value, b_slope


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    x, gate, weight, y, rows, eps, s_x_m, s_x_h, s_gate_m, s_gate_h,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    ACTIVATION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BR rows; row m * H + h is head h of token m."""
    begin(CHAINED)
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    m = (r < rows)[:, None] & (o_v < V)[None, :]
    p_x = x + (r // H * s_x_m + r % H * s_x_h)[:, None] + o_v[None, :]
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) / V + eps) * b_w
    if ACTIVATION != "none":
        p_gate = gate + (r // H * s_gate_m + r % H * s_gate_h)[:, None] + o_v[None, :]
        b_value, _ = activate(tl.load(p_gate, mask=m, other=0.0).to(tl.float32), ACTIVATION)
        b_y *= b_value
    tl.store(y + r[:, None] * V + o_v[None, :], b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows"])
def gated_norm_backward_kernel(
    d_y, x, gate, weight, d_x, d_gate, d_weight, rows, eps,
    s_dy_m, s_dy_h, s_x_m, s_x_h, s_gate_m, s_gate_h,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """TILES times BR rows, and their part of d weight.

    dn = weight * activation(gate) * dy        dx = (dn - n mean(n dn)) / sqrt(mean(x^2) + eps)
    """
    o_v = tl.arange(0, BV)
    b_w = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    b_dw = tl.zeros([BR, BV], tl.float32)
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BR + tl.arange(0, BR)
        m = (r < rows)[:, None] & (o_v < V)[None, :]
        p_x = x + (r // H * s_x_m + r % H * s_x_h)[:, None] + o_v[None, :]
        p_dy = d_y + (r // H * s_dy_m + r % H * s_dy_h)[:, None] + o_v[None, :]
        o_out = r[:, None] * V + o_v[None, :]
        b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy, mask=m, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) / V + eps)
        b_n = b_x * b_r
        if ACTIVATION != "none":
            p_gate = gate + (r // H * s_gate_m + r % H * s_gate_h)[:, None] + o_v[None, :]
            b_gate = tl.load(p_gate, mask=m, other=0.0).to(tl.float32)
            b_value, b_slope = activate(b_gate, ACTIVATION)
            b_dgate = b_dy * b_n * b_w * b_slope
            tl.store(d_gate + o_out, b_dgate.to(d_gate.dtype.element_ty), mask=m)
            b_dy *= b_value
        b_dw += b_dy * b_n
        b_dn = b_dy * b_w
        b_dx = b_r * (b_dn - b_n * (tl.sum(b_n * b_dn, axis=1, keep_dims=True) / V))
        tl.store(d_x + o_out, b_dx.to(d_x.dtype.element_ty), mask=m)
    p_dw = d_weight + tl.program_id(0) * V + o_v
    tl.store(p_dw, tl.sum(b_dw, axis=0), mask=o_v < V)


@Recorded
def gated_norm(inputs: GatedNorm) -> tuple[Tensor]:
    """y like x, contiguous."""
    y = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    if y.numel():
        values = arguments(inputs, FORWARD_TILE)
        grid = cdiv(values["rows"], values["BR"]), 1, 1
        launch(gated_norm_kernel, grid, values | chained() | {"y": y})
    return (y,)


def gated_norm_backward(given: Backward[GatedNorm]) -> Gradients:
    """Gradients by x, gate and weight."""
    return gated_norm_gradients(given.inputs, *given.gradients)


@Recorded
def gated_norm_gradients(inputs: GatedNorm, d_y: Tensor) -> Gradients:
    """The same from the gradient by y."""
    values, d_y = arguments(inputs, BACKWARD_TILE), heads_of(d_y)
    programs = cdiv(values["rows"], values["BR"] * TILES)
    d_x, d_gate = (
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (inputs.x, inputs.gate)
    )
    d_weight = torch.empty(programs, values["V"], dtype=torch.float32, device=d_y.device)
    if programs:
        values |= {"d_y": d_y, "s_dy_m": d_y.stride(0), "s_dy_h": d_y.stride(1), "TILES": TILES}
        values |= {"d_x": d_x, "d_gate": d_gate, "d_weight": d_weight}
        launch(gated_norm_backward_kernel, (programs, 1, 1), values)
    return d_x, d_gate, sum_of_parts(d_weight, inputs.weight)


def arguments(inputs: GatedNorm, elements: int) -> dict[str, Any]:
    """What both kernels are given of a call, in tiles of so many elements."""
    x, weight = heads_of(inputs.x), inputs.weight.contiguous()
    gate = None if inputs.gate is None else heads_of(inputs.gate)
    (tokens, heads, size), width = x.shape, power_of_2(x.shape[2])
    s_gate_m, s_gate_h, _ = (0, 0, 1) if gate is None else gate.stride()
    values = {**options(width), "x": x, "gate": gate, "weight": weight, "eps": inputs.eps}
    values |= {"s_x_m": x.stride(0), "s_x_h": x.stride(1)}
    values |= {"s_gate_m": s_gate_m, "s_gate_h": s_gate_h, "rows": tokens * heads}
    values |= {"H": heads, "V": size, "BV": width, "BR": max(elements // width, 1)}
    return values | {"ACTIVATION": "none" if gate is None else inputs.activation}


def heads_of(x: Tensor) -> Tensor:
    """[..., H, V] -> [M, H, V], [B, T, V] -> [M, 1, V]: a view wherever the leading axes allow."""
    x = x if x.ndim > 3 else x.unsqueeze(-2)
    sizes = x.shape[-2:]
    return adjacent(x.reshape(-1, *sizes) if x.numel() else x.new_empty(0, *sizes))


def options(width: int) -> dict[str, int | bool]:
    return {"num_stages": 1, "num_warps": 4 if width <= 2048 else 8}


# A branch added to the stream, the root-mean-square norm of the sum, and the gradient of both.
#
#     s = x + y        n = s / sqrt(mean(s^2) + eps)        z = weight n
#     dn = weight dz   dx = dy = ds + (dn - n mean(n dn)) / sqrt(mean(s^2) + eps)
#
# A row is one token. The sum is rounded before it is normalised, as it is when others read it.


# Rows whose share of d weight one program adds up.
ROWS = 8


@triton.jit
def residual_norm_kernel(
    x, y, weight, s, z, eps, s_x, s_y, V: tl.constexpr, BV: tl.constexpr, CHAINED: tl.constexpr
):
    begin(CHAINED)
    r = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BV)
    m = o_v < V
    b_x = tl.load(x + r * s_x + o_v, mask=m, other=0.0).to(tl.float32)
    b_y = tl.load(y + r * s_y + o_v, mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_v, mask=m, other=0.0).to(tl.float32)
    b_rounded = (b_x + b_y).to(s.dtype.element_ty)
    tl.store(s + r * V + o_v, b_rounded, mask=m)
    b_s = b_rounded.to(tl.float32)
    b_z = b_s * tl.rsqrt(tl.sum(b_s * b_s) / V + eps) * b_w
    tl.store(z + r * V + o_v, b_z.to(z.dtype.element_ty), mask=m)


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def residual_norm_backward_kernel(
    d_s, d_z, s, weight, d_x, d_weight, rows, eps, s_ds, s_dz,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """ROWS rows, and their part of d weight; with SUM the sum has a gradient of its own."""
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    b_w = tl.load(weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BV], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(ROWS):
        r = first + i
        m = m_v & (r < rows)
        b_s = tl.load(s + r * V + o_v, mask=m, other=0.0).to(tl.float32)
        b_dz = tl.load(d_z + r * s_dz + o_v, mask=m, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_s * b_s) / V + eps)
        b_n = b_s * b_r
        b_dw += b_dz * b_n
        b_dn = b_dz * b_w
        b_dx = b_r * (b_dn - b_n * (tl.sum(b_n * b_dn) / V))
        if SUM:
            b_dx += tl.load(d_s + r * s_ds + o_v, mask=m, other=0.0).to(tl.float32)
        tl.store(d_x + r * V + o_v, b_dx.to(d_x.dtype.element_ty), mask=m)
    tl.store(d_weight + tl.program_id(0) * V + o_v, b_dw, mask=m_v)


@Recorded
def residual_norm(inputs: ResidualNorm) -> tuple[Tensor, Tensor]:
    """s and z like x, in the wider of the dtypes of x and y."""
    x, y = adjacent(as_rows(inputs.x)), adjacent(as_rows(inputs.y))
    # An operator of PyTorch, which is no launch.
    dtype = x.dtype if x.dtype == y.dtype else torch.promote_types(x.dtype, y.dtype)
    s, z = (torch.empty(inputs.x.shape, dtype=dtype, device=x.device) for _ in range(2))
    if s.numel():
        rows, size = x.shape
        values = {"x": x, "y": y, "s_x": x.stride(0), "s_y": y.stride(0), "s": s, "z": z}
        values |= {**norm_of(inputs, size), **chained()}
        launch(residual_norm_kernel, (rows, 1, 1), values)
    return s, z


def residual_norm_backward(given: Backward[ResidualNorm]) -> Gradients:
    """The gradient by x, which is that by y, and by weight, from s alone."""
    (d_s, d_z), inputs = given.gradients, given.inputs
    if d_z is None:
        assert d_s is not None
        return d_s.clone(), torch.zeros_like(inputs.weight)
    return residual_norm_gradients(inputs, d_s, d_z, *given.saved)


@Recorded
def residual_norm_gradients(
    inputs: ResidualNorm, d_s: Tensor | None, d_z: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """The same from the gradients by both outputs."""
    d_s, d_z = None if d_s is None else adjacent(as_rows(d_s)), adjacent(as_rows(d_z))
    d_x, (rows, size) = torch.empty_like(s), d_z.shape
    programs = cdiv(rows, ROWS)
    d_weight = torch.empty(programs, size, dtype=torch.float32, device=s.device)
    if programs:
        values = {"d_s": d_s, "d_z": d_z, "s": s, "d_x": d_x, "d_weight": d_weight, "rows": rows}
        values |= {"s_ds": 0 if d_s is None else d_s.stride(0), "s_dz": d_z.stride(0)}
        values |= {**norm_of(inputs, size), "ROWS": ROWS, "SUM": d_s is not None}
        launch(residual_norm_backward_kernel, (programs, 1, 1), values)
    return d_x, sum_of_parts(d_weight, inputs.weight)


def norm_of(inputs: ResidualNorm, size: int) -> dict[str, Any]:
    """What both kernels are given of the norm."""
    width = power_of_2(size)
    values = {"weight": inputs.weight.contiguous(), "eps": inputs.eps, "V": size, "BV": width}
    return values | options(width)
