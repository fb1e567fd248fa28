"""Root-mean-square norm of each head, multiplied by an activated gate, and its gradient.

    n = x / sqrt(mean(x^2) + eps)        y = (OFFSET + weight) * n * activation(gate)

A row is one head of one token. Nothing but the inputs is kept for the backward: a row is read
whole anyway, and its norm costs less than reading it back. Tiles have powers of two of columns, so
that rows of three times as many are three parts.
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

# Triton's compiler knows parts + (part,), not (*parts, part).
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

# Elements of a tile, of one in three parts, and of one of the backward.
FORWARD_TILE, THREE_PARTS, BACKWARD_TILE = 2048, 1024, 1024
# Tiles or rows, at least, whose share of d weight a program of a backward adds up, and its programs
# at most: somebody has to read all shares.
TILES, PROGRAMS = 8, 2048
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x), in float32: a division is ten instructions where a root is one."""
    b_root = tl.rsqrt(1 + tl.exp2(b_x * -LOG2_E))
    return b_root * b_root


@triton.jit
def activate(b_gate, ACTIVATION: tl.constexpr):
    b_s = sigmoid(b_gate)
    if ACTIVATION == "silu":
        b_value, b_slope = b_gate * b_s, b_s * (1 + b_gate * (1 - b_s))
    else:
        b_value, b_slope = b_s, b_s * (1 - b_s)
    return b_value, b_slope


@triton.jit
def load_parts(p, o_v, m_r, V: tl.constexpr, BV: tl.constexpr):
    """The parts of rows at p [BR, 1], BV columns each."""
    parts = ()
    for c in tl.static_range(0, V, BV):
        m = m_r if V % BV == 0 else m_r & (c + o_v < V)[None, :]
        parts = parts + (tl.load(p + c + o_v[None, :], mask=m, other=0.0),)
    return parts


@triton.jit
def store_part(p, b, c, o_v, m_r, V: tl.constexpr, BV: tl.constexpr):
    m = m_r if V % BV == 0 else m_r & (c + o_v < V)[None, :]
    tl.store(p + c + o_v[None, :], b.to(p.dtype.element_ty), mask=m)


@triton.jit
def weights(weight, o_v, V: tl.constexpr, BV: tl.constexpr, OFFSET: tl.constexpr):
    """The parts of OFFSET + weight, [1, BV] in float32."""
    parts = ()
    for c in tl.static_range(0, V, BV):
        b_w = tl.load(weight + c + o_v, mask=c + o_v < V, other=0.0)
        parts = parts + (b_w.to(tl.float32)[None, :] + OFFSET,)
    return parts


@triton.jit
def mean(xs, ys, V: tl.constexpr, N: tl.constexpr):
    """Mean of x y over the N parts of each row, [BR, 1]."""
    b_sum = xs[0].to(tl.float32) * ys[0].to(tl.float32)
    for i in tl.static_range(1, N):
        b_sum += xs[i].to(tl.float32) * ys[i].to(tl.float32)
    return tl.sum(b_sum, axis=1, keep_dims=True) / V


@triton.jit
def rows_of(x, r, s_m, s_h, H: tl.constexpr):
    """Addresses [BR, 1] of rows; row m * H + h is head h of token m."""
    return x + (r // H * s_m + r % H * s_h)[:, None]


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    x, gate, weight, y, rows, eps, s_x_m, s_x_h, s_gate_m, s_gate_h,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    ACTIVATION: tl.constexpr, OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    begin(CHAINED)
    N: tl.constexpr = (V + BV - 1) // BV
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    m_r = (r < rows)[:, None]
    xs = load_parts(rows_of(x, r, s_x_m, s_x_h, H), o_v, m_r, V, BV)
    if ACTIVATION != "none":
        gates = load_parts(rows_of(gate, r, s_gate_m, s_gate_h, H), o_v, m_r, V, BV)
    ws = weights(weight, o_v, V, BV, OFFSET)
    b_r = tl.rsqrt(mean(xs, xs, V, N) + eps)
    for i in tl.static_range(N):
        b_y = xs[i].to(tl.float32) * b_r * ws[i]
        if ACTIVATION != "none":
            b_value, _ = activate(gates[i].to(tl.float32), ACTIVATION)
            b_y *= b_value
        store_part(y + r[:, None] * V, b_y, i * BV, o_v, m_r, V, BV)


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows", "tiles"])
def gated_norm_backward_kernel(
    d_y, x, gate, weight, y, d_x, d_gate, d_weight, rows, tiles, eps,
    s_dy_m, s_dy_h, s_x_m, s_x_h, s_gate_m, s_gate_h, s_dg_m, s_dg_h,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    ACTIVATION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """`tiles` times BR rows, and their part of d weight; y, if it is asked for, is made again.

    dn = weight * activation(gate) * dy        dx = (dn - n mean(n dn)) / sqrt(mean(x^2) + eps)
    """
    o_v = tl.arange(0, BV)
    b_w = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :] + OFFSET
    b_dw = tl.zeros([BR, BV], tl.float32)
    for tile in range(tiles):
        r = (tl.program_id(0).to(tl.int64) * tiles + tile) * BR + tl.arange(0, BR)
        m = (r < rows)[:, None] & (o_v < V)[None, :]
        p_x = rows_of(x, r, s_x_m, s_x_h, H) + o_v[None, :]
        p_dy = rows_of(d_y, r, s_dy_m, s_dy_h, H) + o_v[None, :]
        o_out = r[:, None] * V + o_v[None, :]
        b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy, mask=m, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) / V + eps)
        b_n = b_x * b_r
        if ACTIVATION != "none":
            p_gate = rows_of(gate, r, s_gate_m, s_gate_h, H) + o_v[None, :]
            b_gate = tl.load(p_gate, mask=m, other=0.0).to(tl.float32)
            b_value, b_slope = activate(b_gate, ACTIVATION)
            b_dgate = b_dy * b_n * b_w * b_slope
            p_dg = rows_of(d_gate, r, s_dg_m, s_dg_h, H) + o_v[None, :]
            tl.store(p_dg, b_dgate.to(d_gate.dtype.element_ty), mask=m)
            b_dy *= b_value
        if y is not None:
            b_y = b_n * b_w
            if ACTIVATION != "none":
                b_y *= b_value
            tl.store(y + o_out, b_y.to(y.dtype.element_ty), mask=m)
        b_dw += b_dy * b_n
        b_dn = b_dy * b_w
        b_dx = b_r * (b_dn - b_n * (tl.sum(b_n * b_dn, axis=1, keep_dims=True) / V))
        tl.store(d_x + o_out, b_dx.to(d_x.dtype.element_ty), mask=m)
    p_dw = d_weight + tl.program_id(0) * V + o_v
    tl.store(p_dw, tl.sum(b_dw, axis=0), mask=o_v < V)


@Recorded
def gated_norm(inputs: GatedNorm, dtype: torch.dtype | None = None) -> tuple[Tensor]:
    """dtype: Of y, if not that of x."""
    y = torch.empty(inputs.x.shape, dtype=dtype or inputs.x.dtype, device=inputs.x.device)
    if y.numel():
        values = arguments(inputs, True)
        grid = cdiv(values["rows"], values["BR"]), 1, 1
        launch(gated_norm_kernel, grid, values | chained() | {"y": y})
    return (y,)


def gated_norm_backward(given: Backward[GatedNorm]) -> Gradients:
    return gated_norm_gradients(given.inputs, *given.gradients)


@Recorded
def gated_norm_gradients(
    inputs: GatedNorm, d_y: Tensor, d_gate: Tensor | None = None, remakes: bool = False
) -> Gradients:  # fmt: skip
    """The same from the gradient by y; a given d_gate is written, and not returned.

    remakes: y takes the place of d_y, which lies in one piece.
    """
    values, d_y = arguments(inputs, False), heads_of(d_y)
    gate, made = inputs.gate, None
    if gate is not None and d_gate is None:
        d_gate = made = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    d_x = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=d_y.device)
    tiles, programs = shares(cdiv(values["rows"], values["BR"]))
    d_weight = torch.empty(programs, values["V"], dtype=torch.float32, device=d_y.device)
    if programs:
        by_head = d_y if d_gate is None else heads_of(d_gate)
        values |= {"d_y": d_y, "s_dy_m": d_y.stride(0), "s_dy_h": d_y.stride(1), "tiles": tiles}
        values |= {"d_x": d_x, "d_gate": d_gate, "d_weight": d_weight}
        values["y"] = d_y if remakes else None
        values |= {"s_dg_m": by_head.stride(0), "s_dg_h": by_head.stride(1)}
        launch(gated_norm_backward_kernel, (programs, 1, 1), values)
    return d_x, made, sum_of_parts(d_weight, inputs.weight)


def shares(count: int) -> tuple[int, int]:
    tiles = max(TILES, cdiv(count, PROGRAMS))
    return tiles, cdiv(count, tiles)


def arguments(inputs: GatedNorm, forward: bool) -> dict[str, Any]:
    """What the kernel of a pass is given of a call."""
    x, weight = heads_of(inputs.x), inputs.weight.contiguous()
    gate = None if inputs.gate is None else heads_of(inputs.gate)
    tokens, heads, size = x.shape
    s_gate_m, s_gate_h, _ = (0, 0, 1) if gate is None else gate.stride()
    values = {**options(size), "x": x, "gate": gate, "weight": weight, "eps": inputs.eps}
    values |= {"s_x_m": x.stride(0), "s_x_h": x.stride(1)}
    values |= {"s_gate_m": s_gate_m, "s_gate_h": s_gate_h, "rows": tokens * heads}
    width, elements = power_of_2(size), FORWARD_TILE if forward else BACKWARD_TILE
    if forward and width != size and power_of_2(size // 3) * 3 == size:
        width, elements = size // 3, THREE_PARTS
    values |= {"H": heads, "V": size, "BV": width, "BR": max(elements // width, 1)}
    values["OFFSET"] = int(inputs.zero_centered)
    return values | {"ACTIVATION": "none" if gate is None else inputs.activation}


def heads_of(x: Tensor) -> Tensor:
    """[..., H, V] -> [M, H, V], [B, T, V] -> [M, 1, V]: a view wherever the leading axes allow."""
    x = x if x.ndim > 3 else x.unsqueeze(-2)
    sizes = x.shape[-2:]
    return adjacent(x.reshape(-1, *sizes) if x.numel() else x.new_empty(0, *sizes))


def options(size: int) -> dict[str, int | bool]:
    return {"num_stages": 1, "num_warps": 4 if size <= 2048 else 8}


# A branch added to the stream, the root-mean-square norm of the sum, and the gradient of both.
#
#     s = x + y        n = s / sqrt(mean(s^2) + eps)        z = weight n
#     dn = weight dz   dx = dy = ds + (dn - n mean(n dn)) / sqrt(mean(s^2) + eps)
#
# A row is one token. The sum is rounded before it is normalised, as it is when others read it.


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
@triton.jit(do_not_specialize=["rows", "each"])
def residual_norm_backward_kernel(
    d_s, d_z, s, weight, d_x, d_y, d_weight, rows, each, eps, s_ds, s_dz,
    V: tl.constexpr, BV: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """`each` rows, and their part of d weight; with SUM the sum has a gradient of its own.

    d_y is d_x once more, in another dtype, if it is asked for.
    """
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    b_w = tl.load(weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BV], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each
    for i in range(each):
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
        if d_y is not None:
            tl.store(d_y + r * V + o_v, b_dx.to(d_y.dtype.element_ty), mask=m)
    tl.store(d_weight + tl.program_id(0) * V + o_v, b_dw, mask=m_v)


@Recorded
def residual_norm(inputs: ResidualNorm, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """s like x, in the wider of the dtypes of x and y, and z, in `dtype` or that of s."""
    x, y = adjacent(as_rows(inputs.x)), adjacent(as_rows(inputs.y))
    # As promote_types says, which is an operator and no launch: none that has it is recorded.
    wide = x.dtype if x.dtype == y.dtype else torch.float32
    s, z = (torch.empty(inputs.x.shape, dtype=of, device=x.device) for of in (wide, dtype or wide))
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
    return residual_norm_gradients(inputs, d_s, d_z, *given.saved)[:2]


@Recorded
def residual_norm_gradients(
    inputs: ResidualNorm, d_s: Tensor | None, d_z: Tensor, s: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients by x and weight, and that by y in `dtype`, if it is not that by x."""
    d_s, d_z = None if d_s is None else adjacent(as_rows(d_s)), adjacent(as_rows(d_z))
    d_x, (rows, size) = torch.empty_like(s), d_z.shape
    d_y = None if dtype in (None, s.dtype) else torch.empty(s.shape, dtype=dtype, device=s.device)
    each, programs = shares(rows)
    d_weight = torch.empty(programs, size, dtype=torch.float32, device=s.device)
    if programs:
        values: dict[str, Any] = {"d_s": d_s, "d_z": d_z, "s": s, "d_x": d_x, "d_y": d_y}
        values |= {"s_ds": 0 if d_s is None else d_s.stride(0), "s_dz": d_z.stride(0)}
        values |= {"d_weight": d_weight, "rows": rows, "each": each, "SUM": d_s is not None}
        values |= norm_of(inputs, size)
        # A warp that waits for no other asks for its next row sooner.
        values |= {"num_warps": 2} if size <= 1024 else {}
        launch(residual_norm_backward_kernel, (programs, 1, 1), values)
    return d_x, sum_of_parts(d_weight, inputs.weight), d_y


def norm_of(inputs: ResidualNorm, size: int) -> dict[str, Any]:
    width = power_of_2(size)
    values = {"weight": inputs.weight.contiguous(), "eps": inputs.eps, "V": size, "BV": width}
    return values | options(width)
