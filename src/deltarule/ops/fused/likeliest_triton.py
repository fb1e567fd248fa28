"""The likeliest token of each row of logits, in one kernel: -1 where they are no numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused_kernels import adjacent
from deltarule.ops.runtime.chained import begin, chained
from deltarule.ops.runtime.named import launch

OPTIONS = {"num_stages": 1, "num_warps": 16}
BLOCK = 8192


@triton.jit
def likeliest_kernel(logits, tokens, V, s_row, BV: tl.constexpr, CHAINED: tl.constexpr):
    """One row: the first of the largest."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    b_best = tl.full([BV], float("-inf"), tl.float32)
    b_place, b_bad = tl.zeros([BV], tl.int32), tl.zeros([BV], tl.int32)
    for i in range(0, V, BV):
        o = i + tl.arange(0, BV)
        b = tl.load(logits + row * s_row + o, mask=o < V, other=float("-inf")).to(tl.float32)
        b_bad = tl.where(b == b, b_bad, 1)
        b_place = tl.where(b > b_best, o, b_place)
        b_best = tl.maximum(b, b_best)
    best = tl.max(b_best)
    place = tl.min(tl.where(b_best == best, b_place, V))
    number = (best > float("-inf")) & (best < float("inf")) & (tl.max(b_bad) == 0)
    tl.store(tokens + row, tl.where(number, place, -1).to(tl.int64))


def likeliest(logits: Tensor) -> Tensor:
    """Tokens [B] of logits [B, V]."""
    logits = adjacent(logits)
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        values = {**OPTIONS, **chained(), "BV": BLOCK, "logits": logits, "tokens": tokens}
        values |= {"V": size, "s_row": logits.stride(0)}
        launch(likeliest_kernel, (rows, 1, 1), values)
    return tokens
