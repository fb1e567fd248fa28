"""Products of a few rows with a matrix, which take as long as it takes to read the matrix.

y = x W^T        x [M, I] with M up to 8, W [O, I]

A program reads BO rows of W, BI channels at a time, and keeps a sum for each place of a tile until
the end: no thread waits for another in between, and many loads are on their way at once. The first
tiles are on their way before x is looked at, which in a chain of kernels is not there yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.chained import chained, let_next_start, wait_for_last
from deltarule.ops.runtime.launch import launch

# Triton's compiler knows tiles + (tile,), not (*tiles, tile).
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

# Rows of W in a program, and channels that it reads at a time.
OF_PROGRAM, CHANNELS = 4, 1024
# Tiles of W that are held at once, of one row of x.
HELD = 6
# Written out, because Triton's default follows an environment variable.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True, "num_warps": 4}


@triton.jit
def weights_at(p_w, i, m_o, I: tl.constexpr, BI: tl.constexpr):
    """BI channels of the rows of W."""
    o_i = i + tl.arange(0, BI)
    return tl.load(p_w + o_i[None, :], mask=m_o[:, None] & (o_i < I)[None, :], other=0.0)


@triton.jit
def products(b_w, x, i, M, s_x, I: tl.constexpr, ROWS: tl.constexpr, BI: tl.constexpr):
    """[ROWS, BO, BI] products of a tile with all rows of x."""
    o_i, o_m = i + tl.arange(0, BI), tl.arange(0, ROWS)
    m_x = (o_m < M)[:, None] & (o_i < I)[None, :]
    b_x = tl.load(x + o_m[:, None] * s_x + o_i[None, :], mask=m_x, other=0.0)
    return b_w.to(tl.float32)[None, :, :] * b_x.to(tl.float32)[:, None, :]


@triton.jit
def few_rows_kernel(
    x, weight, y, M, O, s_x, I: tl.constexpr, ROWS: tl.constexpr, BO: tl.constexpr,
    BI: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BO channels of y for all rows of x."""
    let_next_start(CHAINED)
    o_o = tl.program_id(0) * BO + tl.arange(0, BO)
    o_m, m_o = tl.arange(0, ROWS), o_o < O
    p_w = weight + o_o.to(tl.int64)[:, None] * I
    tiles = ()
    for j in tl.static_range(EARLY):
        tiles = tiles + (weights_at(p_w, j * BI, m_o, I, BI),)
    wait_for_last(CHAINED)
    b_sum = tl.zeros([ROWS, BO, BI], tl.float32)
    for j in tl.static_range(EARLY):
        b_sum += products(tiles[j], x, j * BI, M, s_x, I, ROWS, BI)
    for i in range(EARLY * BI, I, BI):
        b_sum += products(weights_at(p_w, i, m_o, I, BI), x, i, M, s_x, I, ROWS, BI)
    b_y = tl.sum(b_sum, axis=2).to(y.dtype.element_ty)
    m_y = (o_m < M)[:, None] & m_o[None, :]
    tl.store(y + o_m[:, None] * O + o_o[None, :], b_y, mask=m_y)


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """y [M, O] of x [M, I], whose rows may lie apart, and weight [O, I]."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    held = triton.next_power_of_2(rows)
    # The sums of all rows stay in registers.
    channels = min(CHANNELS // max(1, held // 2), triton.next_power_of_2(inputs))
    constants = {
        "I": inputs, "ROWS": held, "BO": OF_PROGRAM, "BI": channels,
        "EARLY": min(triton.cdiv(inputs, channels), HELD), **chained(), **OPTIONS,
    }  # fmt: skip
    given = x, weight, y, rows, outputs, x.stride(0)
    launch(few_rows_kernel, (triton.cdiv(outputs, OF_PROGRAM), 1, 1), given, constants)
    return y
