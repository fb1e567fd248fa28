"""Products of a few rows with a matrix, which take as long as it takes to read the matrix.

    y = x W^T (+ r)                     x [M, I] with M small, W [O, I], r what y is added to
    y = (SiLU(gate) * up) W^T + r       what stands before a product is made by each program itself
    y = norm(x) W^T (+ r)               over heads, with an output gate or without

A program reads BO rows of W and keeps them: they are on their way before x is looked at, which in a
chain of kernels is not there yet. Then it takes one row of x after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.norms_triton import activate
from deltarule.ops.runtime.chained import chained, let_next_start, wait_for_last
from deltarule.ops.runtime.launch import launch
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Triton's compiler knows tiles + (tile,), not (*tiles, tile).
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

# Rows of W in a program of one row of x, and channels that it reads at a time.
OF_PROGRAM, CHANNELS = 8, 1024
# Tiles of W that are kept; of more, the rest is read again for each row of x.
KEPT = 6
# Written out, because Triton's default follows an environment variable.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True, "num_warps": 8}


@triton.jit
def weights_at(p_w, i, m_o, I: tl.constexpr, BI: tl.constexpr):
    """BI channels of the rows of W."""
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
def put_out(b_y, residual, y, m, o_o, m_o, O, ADDED: tl.constexpr):
    """One row of y."""
    if ADDED:
        b_y += tl.load(residual + m * O + o_o, mask=m_o, other=0.0).to(tl.float32)
    tl.store(y + m * O + o_o, b_y.to(y.dtype.element_ty), mask=m_o)


@triton.jit
def few_rows_kernel(
    x, up, weight, residual, y, O, s_x, s_up, I: tl.constexpr, M: tl.constexpr, BO: tl.constexpr,
    BI: tl.constexpr, EARLY: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """BO channels of y for all rows of x."""
    let_next_start(CHAINED)
    o_o = tl.program_id(0) * BO + tl.arange(0, BO)
    m_o = o_o < O
    p_w = weight + o_o.to(tl.int64)[:, None] * I
    tiles = ()
    for j in tl.static_range(EARLY):
        tiles = tiles + (weights_at(p_w, j * BI, m_o, I, BI),)
    wait_for_last(CHAINED)
    for m in tl.static_range(M):
        b_sum = tl.zeros([BO, BI], tl.float32)
        for j in tl.static_range(EARLY):
            b_x = inputs_at(x, up, j * BI, I, BI, GATED)
            b_sum += tiles[j].to(tl.float32) * b_x[None, :]
        for i in range(EARLY * BI, I, BI):
            b_x = inputs_at(x, up, i, I, BI, GATED)
            b_sum += weights_at(p_w, i, m_o, I, BI).to(tl.float32) * b_x[None, :]
        put_out(tl.sum(b_sum, axis=1), residual, y, m, o_o, m_o, O, ADDED)
        x += s_x
        up += s_up


@triton.jit
def normed_rows_kernel(
    x, gate, scale, weight, residual, y, O, eps, s_x_m, s_x_h, s_gate_m, s_gate_h,
    M: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BO: tl.constexpr, BH: tl.constexpr,
    BV: tl.constexpr, ACTIVATION: tl.constexpr, ADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BO channels of y for all rows of x, whose heads are normalised, scaled and gated."""
    let_next_start(CHAINED)
    o_o, o_h, o_v = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, BH), tl.arange(0, BV)
    m_o, m_x = o_o < O, (o_h < H)[:, None] & (o_v < V)[None, :]
    p_w = weight + o_o.to(tl.int64)[:, None, None] * (H * V)
    o_i = o_h[:, None] * V + o_v[None, :]
    b_w = tl.load(p_w + o_i[None, :, :], mask=m_o[:, None, None] & m_x[None, :, :], other=0.0)
    b_scale = tl.load(scale + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    wait_for_last(CHAINED)
    for m in tl.static_range(M):
        p_x = x + m * s_x_m + o_h[:, None] * s_x_h + o_v[None, :]
        b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) / V + eps) * b_scale
        if ACTIVATION != "none":
            p_gate = gate + m * s_gate_m + o_h[:, None] * s_gate_h + o_v[None, :]
            b_gate = tl.load(p_gate, mask=m_x, other=0.0).to(tl.float32)
            b_value, _ = activate(b_gate, ACTIVATION)
            b_x *= b_value
        b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
        b_y = tl.sum(tl.sum(b_w.to(tl.float32) * b_x[None, :, :], axis=2), axis=1)
        put_out(b_y, residual, y, m, o_o, m_o, O, ADDED)


def few_rows(
    x: Tensor, weight: Tensor, up: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """y [M, O] of x [M, I], or of SiLU(x) up, whose rows may lie apart, and weight [O, I].

    residual: [M, O], contiguous.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    channels = min(CHANNELS, power_of_2(inputs))
    constants = {
        "I": inputs, "M": rows, "BO": program(rows), "BI": channels,
        "EARLY": min(cdiv(inputs, channels), KEPT), "GATED": up is not None,
        "ADDED": residual is not None, **chained(), **OPTIONS,
    }  # fmt: skip
    strides = x.stride(0), 0 if up is None else up.stride(0)
    given = x, x if up is None else up, weight, residual, y, outputs, *strides
    launch(few_rows_kernel, (cdiv(outputs, program(rows)), 1, 1), given, constants)
    return y


def normed_rows(
    x: Tensor,
    scale: Tensor,
    eps: float,
    weight: Tensor,
    gate: Tensor | None = None,
    act: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """y [M, O] of x and gate [M, H, V], whose heads are normalised, and weight [O, H V].

    scale: [V].
    residual: [M, O], contiguous.
    """
    rows, heads, size = x.shape
    y = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    tile = power_of_2(heads), power_of_2(size)
    constants = {
        "M": rows, "H": heads, "V": size, "BO": program(rows), "BH": tile[0], "BV": tile[1],
        "ACTIVATION": act, "ADDED": residual is not None, **chained(), **OPTIONS,
    }  # fmt: skip
    strides = *x.stride()[:2], *((0, 0) if gate is None else gate.stride()[:2])
    given = x, gate, scale, weight, residual, y, weight.shape[0], eps, *strides
    launch(normed_rows_kernel, (cdiv(weight.shape[0], program(rows)), 1, 1), given, constants)
    return y


def program(rows: int) -> int:
    """Rows of W in a program: its registers hold their products with every row of x."""
    return max(OF_PROGRAM // power_of_2(rows), 1)
