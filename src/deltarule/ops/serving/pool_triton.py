"""Rows of a pool between their slots and one piece of memory, without waiting for the GPU."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv

BLOCK = 1024


@triton.jit(do_not_specialize=["null_index"])
def move_kernel(
    pool, rows, slots, null_index, s_n, s_a, s_b, s_c,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of one row [A, B, C]."""
    i_n, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i_n).to(tl.int64)
    mask = i < A * B * C
    held = mask & (slot > null_index)
    o_a, o_b, o_c = i // (B * C), i // C % B, i % C
    p_pool = pool + slot * s_n + o_a.to(tl.int64) * s_a + o_b.to(tl.int64) * s_b + o_c * s_c
    p_rows = rows + i_n * (A * B * C) + i
    if WRITE:
        x = tl.load(p_rows, mask=held, other=0.0)
        tl.store(p_pool, x.to(pool.dtype.element_ty), mask=held)
    else:
        x = tl.load(p_pool, mask=held, other=0.0)
        tl.store(p_rows, x.to(rows.dtype.element_ty), mask=mask)


def move(pool: Tensor, rows: Tensor, slots: Tensor, null_index: int, write: bool) -> None:
    """Rows [N, ...], in one piece, into the slots of a pool [slots, ...], or out of them."""
    while pool.ndim < 4:
        pool = pool.unsqueeze(1)
    values: dict[str, Any] = dict(zip("ABC", pool.shape[1:], strict=True))
    values |= zip(("s_n", "s_a", "s_b", "s_c"), pool.stride(), strict=True)
    values |= {"pool": pool, "rows": rows, "slots": slots, "null_index": null_index}
    grid = len(slots), cdiv(pool[:1].numel(), BLOCK), 1
    if pool.numel() and len(slots):
        launch(move_kernel, grid, values | {"BLOCK": BLOCK, "WRITE": write, "num_warps": 4})
