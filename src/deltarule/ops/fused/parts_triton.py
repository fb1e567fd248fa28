"""Sums over the parts that programs leave of a weight's gradient, in the weight's type and layout.

    out[c] = sum_r parts[r, c]

PyTorch's own sum and its rounding would cost the host two operators after every recorded backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.picked_triton import block_of, numbered, pick_all
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv

# Parts and columns of a tile: all that a program reads at once is on its way together.
TILE = {"BR": 256, "BC": 16, "num_stages": 1, "num_warps": 4}


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def sums_of_parts_kernel(
    parts_0, out_0, parts_1, out_1, parts_2, out_2, columns_0, columns_1, columns_2, rows,
    W: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BC columns, each of K numbers in a part; column w * D + d goes to place d * W + w."""
    i_s, i_c = block_of(tl.program_id(0), columns_0, columns_1, BC)
    parts, out, columns = pick_all(
        i_s, (parts_0, out_0, columns_0), (parts_1, out_1, columns_1), (parts_2, out_2, columns_2)
    )
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < columns
    b_sum = tl.zeros([BR, BC], tl.float32)
    for first in range(0, rows, BR):
        r = (first + tl.arange(0, BR)).to(tl.int64)
        p = parts + (r // K * columns * K + r % K)[:, None] + (o_c * K)[None, :]
        b_sum += tl.load(p, mask=(r < rows)[:, None] & m_c[None, :], other=0.0)
    size = columns // W
    b_out = tl.sum(b_sum, axis=0).to(out.dtype.element_ty)
    tl.store(out + o_c % size * W + o_c // size, b_out, mask=m_c)


def sum_of_parts(parts: Tensor, weight: Tensor) -> Tensor:
    """The gradient like weight of float32 parts [P, ...], each like it.

    A part may have several numbers, side by side, for each of the weight.
    """
    return sums_of_parts([(parts, weight)])[0]


def sums_of_parts(pairs: list[tuple[Tensor, Tensor]], taps: int = 1) -> list[Tensor]:
    """Up to three such sums of as many parts in one launch; each part has the `taps` first."""
    found = [torch.empty(w.shape, dtype=w.dtype, device=w.device) for _, w in pairs]
    each: list[dict[str, Any]] = [
        {"parts": parts, "out": out, "columns": out.numel()}
        for (parts, _), out in zip(pairs, found, strict=True)
    ]
    count = len(pairs[0][0])
    if blocks := sum(cdiv(own["columns"], TILE["BC"]) for own in each):
        numbers = pairs[0][0][0].numel() // each[0]["columns"] if count else 1
        values = {**TILE, **numbered(each, "columns"), "rows": count * numbers}
        launch(sums_of_parts_kernel, (blocks, 1, 1), values | {"W": taps, "K": numbers})
    return found
