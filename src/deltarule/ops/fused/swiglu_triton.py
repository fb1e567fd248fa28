"""SwiGLU of two projections, and its gradient, which brings the product along for the next one.

    s = sigmoid(gate)      h = gate s up
    d up = gate s dh       d gate = s (1 + gate (1 - s)) up dh

Nothing but gate and up is kept for the backward, which reads both anyway and so makes h again for
one write. That may take the place of dh.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.swiglu import GatedProduct
from deltarule.ops.fused_kernels import adjacent
from deltarule.ops.registration import Backward, Gradients
from deltarule.ops.runtime.chained import begin, chained
from deltarule.ops.runtime.launch import Grid
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.replay import Recorded
from deltarule.ops.runtime.sizes import cdiv

# Elements of a program: 16 for each thread, two wide loads in 16 bits.
BLOCK = 2048
OPTIONS = {"num_stages": 1, "num_warps": 4}
WHOLE = torch.contiguous_format


@triton.jit
def places(elements, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of BLOCK elements of a matrix of D columns, and which there are."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return o, o // D, o % D, o < elements


# The number of elements is left to be specialised: a multiple of 16 is what wide loads need.
@triton.jit
def swiglu_kernel(
    gate, up, h, elements, s_gate, s_up, D: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    begin(CHAINED)
    o, row, column, m = places(elements, D, BLOCK)
    b_gate = tl.load(gate + row * s_gate + column, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up + row * s_up + column, mask=m, other=0.0).to(tl.float32)
    b_h = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(h + o, b_h.to(h.dtype.element_ty), mask=m)


@triton.jit
def swiglu_backward_kernel(
    d_h, gate, up, d_gate, d_up, h, elements, s_gate, s_up, s_out,
    D: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of both gradients, and with PRODUCT of h, which may lie where dh does."""
    o, row, column, m = places(elements, D, BLOCK)
    b_gate = tl.load(gate + row * s_gate + column, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up + row * s_up + column, mask=m, other=0.0).to(tl.float32)
    b_dh = tl.load(d_h + o, mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(b_gate)
    b_value = b_gate * b_s
    b_dgate = b_s * (1 + b_gate * (1 - b_s)) * b_up * b_dh
    o_out = row * s_out + column
    tl.store(d_gate + o_out, b_dgate.to(d_gate.dtype.element_ty), mask=m)
    tl.store(d_up + o_out, (b_value * b_dh).to(d_up.dtype.element_ty), mask=m)
    if PRODUCT:
        tl.store(h + o, (b_value * b_up).to(h.dtype.element_ty), mask=m)


def swiglu(inputs: GatedProduct) -> tuple[Tensor]:
    """h [..., D] of gate and up, whose rows may lie apart."""
    (h,) = swiglu_rows(rows_of(*inputs))
    return (h.view(inputs.gate.shape),)


@Recorded
def swiglu_rows(inputs: GatedProduct) -> tuple[Tensor]:
    gate, up = inputs
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if h.numel():
        values, grid = arguments(gate, up)
        launch(swiglu_kernel, grid, {**values, **chained(), "h": h})
    return (h,)


def swiglu_backward(given: Backward[GatedProduct]) -> Gradients:
    (d_h,), inputs = given.gradients, given.inputs
    assert d_h is not None
    found = swiglu_gradients(rows_of(*inputs), d_h.contiguous(), None, False)
    return tuple(x.view(inputs.gate.shape) for x in found)


@Recorded
def swiglu_gradients(
    inputs: GatedProduct, d_h: Tensor, product: Tensor | None, side_by_side: bool
) -> tuple[Tensor, ...]:
    """Gradients by gate and up [M, D], or side by side [M, 2 D]."""
    gate, up = inputs
    rows, size = gate.shape
    if side_by_side:
        both = torch.empty(rows, 2 * size, dtype=gate.dtype, device=gate.device)
        d_gate, d_up = both.split(size, dim=-1)
    else:
        d_gate, d_up = (torch.empty_like(x, memory_format=WHOLE) for x in inputs)
    if gate.numel():
        values, grid = arguments(gate, up)
        values |= {"d_h": d_h, "h": product, "PRODUCT": product is not None}
        values |= {"d_gate": d_gate, "d_up": d_up, "s_out": size * (1 + side_by_side)}
        launch(swiglu_backward_kernel, grid, values)
    return (both,) if side_by_side else (d_gate, d_up)


def rows_of(gate: Tensor, up: Tensor) -> GatedProduct:
    size = gate.shape[-1]
    return GatedProduct(*(adjacent(x).reshape(-1, size) for x in (gate, up)))


def arguments(gate: Tensor, up: Tensor) -> tuple[dict[str, Any], Grid]:
    elements, size = gate.numel(), gate.shape[1]
    values = {**OPTIONS, "gate": gate, "up": up, "s_gate": gate.stride(0), "s_up": up.stride(0)}
    values |= {"elements": elements, "D": size, "BLOCK": BLOCK}
    return values, (cdiv(elements, BLOCK), 1, 1)
