"""The gradient of an embedding: sums of rows by their token, in one order.

    dW[v] = sum_t [token_t = v] dx_t

Of few tokens as products with ones and zeros: a float32 number is the sum of three in bfloat16,
whose products with 1 are exact; they are summed in float32, and a NaN reaches all rows. Of many the
tokens are sorted, and the rows of one token, which then follow each other, are summed in a tree of
tiles: PyTorch's kernels go through one after the other what a frequent token has.
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
RUNS = {"BR": 64, "BD": 32, "num_stages": 1, "num_warps": 2}
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


@triton.jit
def followed_by(started, x, next_started, next_x):
    """Two stretches as one: whether a run starts in it, and what its last run sums to."""
    return started | next_started, tl.where(next_started != 0, next_x, x + next_x)


@triton.jit(do_not_specialize=["rows"])
def run_sums_kernel(
    tokens, order, d_x, d_weight, parts, part_tokens, rows, D: tl.constexpr, BD: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """The sums of runs of one token, [rows, D] in the order of the sorted tokens.

    Those in the midst of a tile are whole; its first and its last, if tiles follow, are parts.
    """
    i, j = tl.program_id(0), tl.arange(0, BR)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    r, m_d = i * BR + j, (o_d < D)[None, :]
    b_token = tl.load(tokens + r, mask=r < rows, other=-1)
    b_before = tl.load(tokens + r - 1, mask=(r < rows) & (j > 0), other=-1)
    b_after = tl.load(tokens + r + 1, mask=(r + 1 < rows) & (j + 1 < BR), other=-1)
    place = r.to(tl.int64)
    if order is not None:
        place = tl.load(order + r, mask=r < rows, other=0)
    m = (r < rows)[:, None] & m_d
    b_x = tl.load(d_x + place[:, None] * D + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    b_starts = (b_token != b_before).to(tl.int32)[:, None] + tl.zeros([BR, BD], tl.int32)
    _, b_sum = tl.associative_scan((b_starts, b_x), 0, followed_by)
    is_end = (b_token != b_after) & (r < rows)
    is_edge = r < 0
    if parts is not None:
        first = tl.load(tokens + i * BR)
        last = tl.load(tokens + tl.minimum(i * BR + BR, rows) - 1)
        is_edge = (b_token == first) | (b_token == last)
        i_part = 2 * i + (b_token != first).to(tl.int32)
        p_part = parts + i_part[:, None].to(tl.int64) * D + o_d[None, :]
        tl.store(p_part, b_sum, mask=(is_end & is_edge)[:, None] & m_d)
        # One run alone has no second part.
        p_part = parts + (2 * i + 1).to(tl.int64) * D + o_d
        tl.store(p_part, tl.zeros([BD], tl.float32), mask=(o_d < D) & (first == last))
        tl.store(part_tokens + 2 * i, first)
        tl.store(part_tokens + 2 * i + 1, last)
    p = d_weight + b_token[:, None].to(tl.int64) * D + o_d[None, :]
    b_sum = b_sum.to(d_weight.dtype.element_ty)
    tl.store(p, b_sum, mask=(is_end & ~is_edge)[:, None] & m_d)


def sums_by_token(d_x: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """Like weight [V, D], of d_x [..., D] and the tokens [...] that were looked up; V < 2^31."""
    rows, size = as_rows(d_x).contiguous(), weight.shape[1]
    # In 32 bits they are sorted in half the passes.
    found, order = tokens.reshape(-1).int().sort(stable=True)
    d_weight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    block = min(max(power_of_2(size), 16), RUNS["BD"])
    values: dict[str, Any] = {"d_x": rows, "order": order, "d_weight": d_weight, "D": size}
    while len(found):
        tiles = cdiv(len(found), RUNS["BR"])
        values |= {"tokens": found, "rows": len(found), "parts": None, "part_tokens": None}
        if tiles > 1:
            found = found.new_empty(2 * tiles)
            values["parts"] = rows.new_empty(2 * tiles, size, dtype=torch.float32)
            values["part_tokens"] = found
        launch(run_sums_kernel, (tiles, cdiv(size, block), 1), values | RUNS | {"BD": block})
        if tiles == 1:
            break
        values |= {"d_x": values["parts"], "order": None}
    return d_weight


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
