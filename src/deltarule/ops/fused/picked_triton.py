"""One grid for up to three tensors whose columns follow each other in it."""

from typing import Any

import triton
import triton.language as tl

# Triton's compiler knows picked + (of,), not (*picked, of).
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"


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


def numbered(each: list[dict[str, Any]], size: str) -> dict[str, Any]:
    """The arguments of a kernel by name and number; tensors that are not there have no columns."""
    filled = [*each, *[{**each[0], size: 0}] * (3 - len(each))]
    return {f"{name}_{i}": x for i, own in enumerate(filled) for name, x in own.items()}
