"""One grid for up to three tensors whose columns follow each other, and sums of parts by it.

    out[c] = sum_r parts[r, c]

The parts are what programs leave of a weight's gradient, the sum is in the weight's type and
layout. PyTorch's own sum and its rounding would cost the host two operators after every recorded
backward.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv

# Triton's compiler knows picked + (of,), not (*picked, of).
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

# Parts and columns of a tile: all that a program reads at once is on its way together.
TILE = {"BR": 512, "BC": 8, "num_stages": 1, "num_warps": 8}


@triton.jit
def block_of(i, D_0, D_1, C: tl.constexpr):
    """Which tensor block i of C columns is of, and where in it."""
    n_0, n_1 = tl.cdiv(D_0, C), tl.cdiv(D_1, C)
    i_s = (i >= n_0).to(tl.int32) + (i >= n_0 + n_1).to(tl.int32)
    return i_s, i - pick(i_s, 0, n_0, n_0 + n_1)


@triton.jit
def pick(i_s, of_0, of_1, of_2):
    """What is given of tensor i_s; None if there is none of any."""
    of = of_0
    if of_0 is not None:
        of = tl.where(i_s == 2, of_2, tl.where(i_s == 1, of_1, of_0))
    return of


@triton.jit
def pick_all(i_s, of_0, of_1, of_2):
    picked = ()
    for i in tl.static_range(len(of_0)):
        picked = picked + (pick(i_s, of_0[i], of_1[i], of_2[i]),)
    return picked


def numbered(each: list[dict[str, Any]], size: str, most: int = 3) -> dict[str, Any]:
    """The arguments of a kernel by name and number; tensors that are not there have no columns."""
    filled = [*each, *[{**each[0], size: 0}] * (most - len(each))]
    return {f"{name}_{i}": x for i, own in enumerate(filled) for name, x in own.items()}


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


def sums_of_parts(
    pairs: list[tuple[Tensor, Tensor]], taps: int = 1, tile: Mapping[str, int] = TILE
) -> list[Tensor]:
    """Up to three such sums of as many parts in one launch; each part has the `taps` first."""
    found = [torch.empty(w.shape, dtype=w.dtype, device=w.device) for _, w in pairs]
    each: list[dict[str, Any]] = [
        {"parts": parts, "out": out, "columns": out.numel()}
        for (parts, _), out in zip(pairs, found, strict=True)
    ]
    count = len(pairs[0][0])
    if blocks := sum(cdiv(own["columns"], tile["BC"]) for own in each):
        numbers = pairs[0][0][0].numel() // each[0]["columns"] if count else 1
        values = {**tile, **numbered(each, "columns"), "rows": count * numbers}
        launch(sums_of_parts_kernel, (blocks, 1, 1), values | {"W": taps, "K": numbers})
    return found
