"""The gradient of a small embedding: sums of rows by their token, as products with ones and zeros.

    dW[v] = sum_t [token_t = v] dx_t

A float32 number is the sum of three in bfloat16, whose products with 1 are exact; they are summed
in float32, in one order; a NaN reaches all rows. PyTorch sorts the tokens first, in ten launches.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.parts_triton import sums_of_parts
from deltarule.ops.fused_kernels import as_rows
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Rows of a tile, and programs that fill a GPU.
ROWS, PROGRAMS = 64, 256
# Few parts of many columns.
SUMS = {"BR": 32, "BC": 256, "num_stages": 1, "num_warps": 8}


@triton.jit(do_not_specialize=["rows", "each"])
def embedding_gradient_kernel(
    tokens, d_x, parts, rows, each, V: tl.constexpr, D: tl.constexpr,
    BV: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """BD columns of the sums over `each` tiles of BR rows."""
    o_v, o_d = tl.arange(0, BV), tl.program_id(1) * BD + tl.arange(0, BD)
    b_sum = tl.zeros([BV, BD], tl.float32)
    for i in range(each):
        r = (tl.program_id(0).to(tl.int64) * each + i) * BR + tl.arange(0, BR)
        b_token = tl.load(tokens + r, mask=r < rows, other=-1)
        b_one = (o_v[:, None] == b_token[None, :]).to(OPERAND)
        m = (r < rows)[:, None] & (o_d < D)[None, :]
        b_left = tl.load(d_x + r[:, None] * D + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        for _ in tl.static_range(3):
            b_part = b_left.to(OPERAND)
            b_sum = tl.dot(b_one, b_part, b_sum)
            b_left -= b_part.to(tl.float32)
    p = parts + (tl.program_id(0).to(tl.int64) * V + o_v)[:, None] * D + o_d[None, :]
    tl.store(p, b_sum, mask=(o_v < V)[:, None] & (o_d < D)[None, :])


def embedding_gradient(d_x: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """Like weight [V, D], of d_x [..., D] and the tokens [...] that were looked up."""
    d_rows, (vocabulary, size) = as_rows(d_x).contiguous(), weight.shape
    width = max(power_of_2(vocabulary), 16)
    block = min(max(power_of_2(size), 16), 32 if width > 128 else 64)
    tiles, blocks = cdiv(len(d_rows), ROWS), cdiv(size, block)
    each = max(tiles * blocks // PROGRAMS, 1)
    shape = cdiv(tiles, each), vocabulary, size
    parts = torch.empty(shape, dtype=torch.float32, device=weight.device)
    # Triton's interpreter has no products in bfloat16.
    compiled = isinstance(embedding_gradient_kernel, triton.JITFunction)
    values: dict[str, Any] = {"OPERAND": tl.bfloat16 if compiled else tl.float32}
    values |= {"tokens": tokens.reshape(-1).contiguous(), "d_x": d_rows, "parts": parts}
    values |= {"rows": len(d_rows), "each": each, "V": vocabulary, "D": size}
    values |= {"BV": width, "BD": block, "BR": ROWS}
    values |= {"num_warps": 8 if width > 128 else 4, "num_stages": 2}
    if len(parts):
        launch(embedding_gradient_kernel, (len(parts), blocks, 1), values)
    return sums_of_parts([(parts, weight)], tile=SUMS)[0]
