"""Products of a few rows with a matrix, which take as long as it takes to read the matrix.

y = x W^T        x [M, I] with M up to 8, W [O, I]

A program reads BO rows of W, BI channels at a time, and keeps a sum for each place of a tile until
the end: no thread waits for another in between, and many loads are on their way at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.launch import launch

# Rows of W in a program, and channels that it reads at a time: few and long, or few and longer.
OF_PROGRAM, CHANNELS, LONG = 4, 1024, 4096
# Written out, because Triton's default follows an environment variable.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True, "num_warps": 4}


@triton.jit
def few_rows_kernel(
    x, weight, y, M, O, I, s_x, ROWS: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr
):  # fmt: skip
    """BO channels of y for all rows of x."""
    o_o = tl.program_id(0) * BO + tl.arange(0, BO)
    o_m, m_o = tl.arange(0, ROWS), o_o < O
    b_sum = tl.zeros([ROWS, BO, BI], tl.float32)
    p_w = weight + o_o.to(tl.int64)[:, None] * I
    for i in range(0, I, BI):
        o_i = i + tl.arange(0, BI)
        m_i = o_i < I
        b_w = tl.load(p_w + o_i[None, :], mask=m_o[:, None] & m_i[None, :], other=0.0)
        m_x = (o_m < M)[:, None] & m_i[None, :]
        b_x = tl.load(x + o_m[:, None] * s_x + o_i[None, :], mask=m_x, other=0.0)
        b_sum += b_w.to(tl.float32)[None, :, :] * b_x.to(tl.float32)[:, None, :]
    b_y = tl.sum(b_sum, axis=2).to(y.dtype.element_ty)
    m_y = (o_m < M)[:, None] & m_o[None, :]
    tl.store(y + o_m[:, None] * O + o_o[None, :], b_y, mask=m_y)


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """y [M, O] of x [M, I], whose rows may lie apart, and weight [O, I]."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    held = triton.next_power_of_2(rows)
    # The sums of all rows stay in registers.
    channels = CHANNELS * (2 if inputs > LONG else 1) // max(1, held // 2)
    constants = {"ROWS": held, "BO": OF_PROGRAM, "BI": channels, **OPTIONS}
    given = x, weight, y, rows, outputs, inputs, x.stride(0)
    launch(few_rows_kernel, (triton.cdiv(outputs, OF_PROGRAM), 1, 1), given, constants)
    return y
