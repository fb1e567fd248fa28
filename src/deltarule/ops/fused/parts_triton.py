"""Sums over the parts that programs leave of a weight's gradient, in the weight's type and layout.

    out[c] = sum_r parts[r, c]

PyTorch's own sum and its rounding would cost the host two operators after every recorded backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv

# Parts and columns of a tile: all that a program reads at once is on its way together.
TILE = {"BR": 256, "BC": 16, "num_stages": 1, "num_warps": 4}


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def sum_of_parts_kernel(
    parts, out, rows, columns, W: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """BC columns, each of K numbers in a part; column w * D + d goes to place d * W + w."""
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = o_c < columns
    b_sum = tl.zeros([BR, BC], tl.float32)
    for first in range(0, rows, BR):
        r = (first + tl.arange(0, BR)).to(tl.int64)
        p = parts + (r // K * columns * K + r % K)[:, None] + (o_c * K)[None, :]
        b_sum += tl.load(p, mask=(r < rows)[:, None] & m_c[None, :], other=0.0)
    size = columns // W
    b_out = tl.sum(b_sum, axis=0).to(out.dtype.element_ty)
    tl.store(out + o_c % size * W + o_c // size, b_out, mask=m_c)


def sum_of_parts(parts: Tensor, weight: Tensor, taps: int = 1) -> Tensor:
    """The gradient like weight of float32 parts [P, ...], each like it or `taps` first.

    A part may have several numbers, side by side, for each of the weight.
    """
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if columns := weight.numel():
        each = parts[0].numel() // columns if len(parts) else 1
        values = {**TILE, "parts": parts, "out": out, "rows": len(parts) * each}
        values |= {"columns": columns, "W": taps, "K": each}
        launch(sum_of_parts_kernel, (cdiv(columns, TILE["BC"]), 1, 1), values)
    return out
