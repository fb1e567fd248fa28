"""Float32 weights in the 16 bits in which they are multiplied, laid end to end by one launch.

Autocast alone has a launch for each weight, and what multiplies with several at once one more.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.parts_triton import numbered, pick
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.replay import Recorded
from deltarule.ops.runtime.sizes import cdiv

# Numbers of a program, and those after which a matrix may begin: 16 bytes.
OPTIONS = {"BLOCK": 2048, "num_stages": 1, "num_warps": 4}
GRAIN = 8


class Weights(NamedTuple):
    """Weights that one launch takes: q, k, v, a, b and a gate."""

    w_0: Tensor
    w_1: Tensor | None = None
    w_2: Tensor | None = None
    w_3: Tensor | None = None
    w_4: Tensor | None = None
    w_5: Tensor | None = None


MOST = len(Weights._fields)


@triton.jit
def pick_of_six(i, of_0, of_1, of_2, of_3, of_4, of_5):
    return tl.where(i < 3, pick(i, of_0, of_1, of_2), pick(i - 3, of_3, of_4, of_5))


@triton.jit
def rounding_kernel(
    w_0, w_1, w_2, w_3, w_4, w_5, n_0, n_1, n_2, n_3, n_4, n_5, s_0, s_1, s_2, s_3, s_4, s_5, end,
    out, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the n numbers of a weight, from place s of out on, and zeros up to the next."""
    i = tl.program_id(1)
    w = pick_of_six(i, w_0, w_1, w_2, w_3, w_4, w_5)
    n = pick_of_six(i, n_0, n_1, n_2, n_3, n_4, n_5)
    s = pick_of_six(i, s_0, s_1, s_2, s_3, s_4, s_5)
    after = pick_of_six(i, s_1, s_2, s_3, s_4, s_5, end)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_w = tl.load(w + o, mask=o < n, other=0.0)
    tl.store(out + s + o, b_w.to(out.dtype.element_ty), mask=o < after - s)


@Recorded
def rounded(weights: Weights, dtype: torch.dtype, *lengths: int) -> tuple[Tensor]:
    """One row of all weights in dtype, each in so many places."""
    given = [weight for weight in weights if weight is not None]
    starts = [sum(lengths[:i]) for i in range(MOST + 1)]
    out = torch.empty(starts[-1], dtype=dtype, device=given[0].device)
    values: dict[str, Any] = {f"s_{i}": start for i, start in enumerate(starts[:-1])}
    values |= numbered([{"w": weight, "n": weight.numel()} for weight in given], "n", MOST)
    values |= {"end": starts[-1], "out": out, **OPTIONS}
    if starts[-1]:
        launch(rounding_kernel, (cdiv(max(lengths), OPTIONS["BLOCK"]), len(given), 1), values)
    return (out,)


def laid(
    matrices: Sequence[Sequence[Tensor]], lacking: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Matrices of up to MOST float32 weights in all, each with rows of zeros after it, in dtype."""
    shapes = tuple([tuple([weight.shape for weight in own]) for own in matrices])
    lengths, places = layout(shapes, tuple([tuple(lacks) for lacks in lacking]))
    (out,) = rounded(Weights(*[weight for own in matrices for weight in own]), dtype, *lengths)
    return [out.as_strided(*place) for place in places]


@lru_cache(256)
def layout(
    shapes: tuple[tuple[torch.Size, ...], ...], lacking: tuple[tuple[int, ...], ...]
) -> tuple[list[int], list[Any]]:
    """Places that each weight takes with its zeros; shape, strides and start of each matrix."""
    lengths: list[int] = []
    places = []
    for own, lacks in zip(shapes, lacking, strict=True):
        width, first = own[0][1], sum(lengths)
        rows = [shape[0] + more for shape, more in zip(own, lacks, strict=True)]
        places.append(((sum(rows), width), (width, 1), first))
        lengths += [width * count for count in rows]
        lengths[-1] += -sum(lengths) % GRAIN
    return lengths, places
