"""SwiGLU of two projections, and its gradient, which brings the product along for the next one.

    s = sigmoid(gate)      h = gate s up
    d up = gate s dh       d gate = s (1 + gate (1 - s)) up dh

Nothing but gate and up is kept for the backward, which reads both anyway and so makes h again for
one write. That may take the place of dh.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.runtime.chained import begin, chained
from deltarule.ops.runtime.launch import launch
from deltarule.ops.runtime.sizes import cdiv

# Elements of a program: 16 for each thread, two wide loads in 16 bits.
BLOCK = 2048
# Written out, because Triton's default follows an environment variable.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True, "num_warps": 4}


# The number of elements is left to be specialised: a multiple of 16 is what wide loads need.
@triton.jit
def swiglu_kernel(gate, up, h, elements, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """BLOCK elements of h."""
    begin(CHAINED)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < elements
    b_gate = tl.load(gate + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up + o, mask=m, other=0.0).to(tl.float32)
    b_h = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(h + o, b_h.to(h.dtype.element_ty), mask=m)


@triton.jit
def swiglu_backward_kernel(
    d_h, gate, up, d_gate, d_up, h, elements, BLOCK: tl.constexpr, PRODUCT: tl.constexpr
):  # fmt: skip
    """BLOCK elements of both gradients, and with PRODUCT of h, which may lie where dh does."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < elements
    b_gate = tl.load(gate + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up + o, mask=m, other=0.0).to(tl.float32)
    b_dh = tl.load(d_h + o, mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(b_gate)
    b_value = b_gate * b_s
    b_dgate = b_s * (1 + b_gate * (1 - b_s)) * b_up * b_dh
    tl.store(d_gate + o, b_dgate.to(d_gate.dtype.element_ty), mask=m)
    tl.store(d_up + o, (b_value * b_dh).to(d_up.dtype.element_ty), mask=m)
    if PRODUCT:
        tl.store(h + o, (b_value * b_up).to(h.dtype.element_ty), mask=m)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if h.numel():
        grid = cdiv(h.numel(), BLOCK), 1, 1
        constants = {"BLOCK": BLOCK, **chained(), **OPTIONS}
        launch(swiglu_kernel, grid, (gate, up, h, h.numel()), constants)
    return h


def swiglu_backward(
    d_h: Tensor, gate: Tensor, up: Tensor, product: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients by gate and up; h goes into `product`, contiguous, if there is one."""
    d_h, gate, up = d_h.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    if gate.numel():
        grid = cdiv(gate.numel(), BLOCK), 1, 1
        given = d_h, gate, up, d_gate, d_up, product, gate.numel()
        constants = {"BLOCK": BLOCK, "PRODUCT": product is not None, **OPTIONS}
        launch(swiglu_backward_kernel, grid, given, constants)
    return d_gate, d_up
