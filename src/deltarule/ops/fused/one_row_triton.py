"""Products of one row with a matrix, which take as long as it takes to read the matrix.

    y = x W^T (+ r)                     x [I], W [O, I], r what y is added to
    y = (SiLU(gate) * up) W^T + r       what stands before a product is made by each program itself
    y = norm(x) W^T (+ r)               over heads, with an output gate or without

A program reads BO rows of W, which are on their way before it looks at x: in a chain of kernels x
is not there yet.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.norms_triton import activate
from deltarule.ops.runtime.chained import chained, let_next_start, wait_for_last
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Triton's compiler knows tiles + (tile,), not (*tiles, tile).
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

# Rows of a 16-bit W in a program, and channels that it reads at a time.
OF_PROGRAM, CHANNELS = 8, 1024
# Tiles of W that are on their way at once.
AHEAD = 4
# So few registers that a processor holds two programs: those of 2048 outputs then run all at once.
OPTIONS = {"maxnreg": 128, "num_stages": 1, "num_warps": 8}


@triton.jit
def weights_at(p_w, i, m_o, I: tl.constexpr, BI: tl.constexpr):
    o_i = i + tl.arange(0, BI)
    return tl.load(p_w + o_i[None, :], mask=m_o[:, None] & (o_i < I)[None, :], other=0.0)


@triton.jit
def inputs_at(x, up, i, I: tl.constexpr, BI: tl.constexpr, GATED: tl.constexpr):
    """BI channels of a row: of x, or of SiLU(x) up, rounded as it is elsewhere."""
    o_i = i + tl.arange(0, BI)
    b_x = tl.load(x + o_i, mask=o_i < I, other=0.0).to(tl.float32)
    if GATED:
        b_up = tl.load(up + o_i, mask=o_i < I, other=0.0).to(tl.float32)
        b_x = (b_x * tl.sigmoid(b_x) * b_up).to(x.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def put_out(b_y, residual, y, o_o, m_o, ADDED: tl.constexpr):
    if ADDED:
        b_y += tl.load(residual + o_o, mask=m_o, other=0.0).to(tl.float32)
    tl.store(y + o_o, b_y.to(y.dtype.element_ty), mask=m_o)


@triton.jit
def one_row_kernel(
    x, up, weight, residual, y, O, I: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
    AHEAD: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    o_o = tl.program_id(0) * BO + tl.arange(0, BO)
    m_o = o_o < O
    p_w = weight + o_o.to(tl.int64)[:, None] * I
    TILES: tl.constexpr = (I + BI - 1) // BI
    tiles = ()
    for j in tl.static_range(min(TILES, AHEAD)):
        tiles = tiles + (weights_at(p_w, j * BI, m_o, I, BI),)
    wait_for_last(CHAINED)
    b_sum = tl.zeros([BO, BI], tl.float32)
    for j in tl.static_range(min(TILES, AHEAD)):
        b_x = inputs_at(x, up, j * BI, I, BI, GATED)
        b_sum += tiles[j].to(tl.float32) * b_x[None, :]
    for i in range(AHEAD * BI, I, BI):
        b_x = inputs_at(x, up, i, I, BI, GATED)
        b_sum += weights_at(p_w, i, m_o, I, BI).to(tl.float32) * b_x[None, :]
    put_out(tl.sum(b_sum, axis=1), residual, y, o_o, m_o, ADDED)


@triton.jit
def normed_row_kernel(
    x, gate, scale, weight, residual, y, O, eps, s_x, s_gate, H: tl.constexpr, V: tl.constexpr,
    BO: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, ACTIVATION: tl.constexpr,
    ADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BO channels of y, of a row whose heads are normalised, scaled and gated."""
    let_next_start(CHAINED)
    o_o, o_h, o_v = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, BH), tl.arange(0, BV)
    m_o, m_x = o_o < O, (o_h < H)[:, None] & (o_v < V)[None, :]
    p_w = weight + o_o.to(tl.int64)[:, None, None] * (H * V)
    o_i = o_h[:, None] * V + o_v[None, :]
    b_w = tl.load(p_w + o_i[None, :, :], mask=m_o[:, None, None] & m_x[None, :, :], other=0.0)
    b_scale = tl.load(scale + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    wait_for_last(CHAINED)
    p_x = x + o_h[:, None] * s_x + o_v[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) / V + eps) * b_scale
    if ACTIVATION != "none":
        p_gate = gate + o_h[:, None] * s_gate + o_v[None, :]
        b_value, _ = activate(tl.load(p_gate, mask=m_x, other=0.0).to(tl.float32), ACTIVATION)
        b_x *= b_value
    b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
    b_y = tl.sum(tl.sum(b_w.to(tl.float32) * b_x[None, :, :], axis=2), axis=1)
    put_out(b_y, residual, y, o_o, m_o, ADDED)


def one_row(
    x: Tensor, weight: Tensor, up: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """y [O] of x [I], or of SiLU(x) up, all with channels side by side, and weight [O, I]."""
    inputs, gated = weight.shape[1], up is not None
    values = {"up": up if gated else x, "I": inputs, "GATED": gated, "AHEAD": AHEAD}
    values["BI"] = min(CHANNELS, power_of_2(inputs))
    return run(one_row_kernel, x, weight, residual, values)


def normed_row(
    x: Tensor,
    scale: Tensor,
    eps: float,
    weight: Tensor,
    gate: Tensor | None = None,
    act: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """y [O] of x and gate [H, V], whose heads are normalised, scale [V] and weight [O, H V]."""
    heads, size = x.shape
    values = {"gate": gate, "scale": scale, "eps": eps, "ACTIVATION": act, "s_x": x.stride(0)}
    values |= {"s_gate": 0 if gate is None else gate.stride(0), "H": heads, "V": size}
    values |= {"BH": power_of_2(heads), "BV": power_of_2(size)}
    return run(normed_row_kernel, x, weight, residual, values)


def run(
    kernel: Any, x: Tensor, weight: Tensor, residual: Tensor | None, values: dict[str, Any]
) -> Tensor:
    # As many bytes of W in a program whatever the dtype.
    outputs, rows = weight.shape[0], OF_PROGRAM * 2 // weight.element_size()
    y = torch.empty(outputs, dtype=x.dtype, device=x.device)
    values |= {"x": x, "weight": weight, "residual": residual, "y": y, "O": outputs, "BO": rows}
    values |= {**OPTIONS, **chained(), "ADDED": residual is not None}
    launch(kernel, (cdiv(outputs, rows), 1, 1), values)
    return y
