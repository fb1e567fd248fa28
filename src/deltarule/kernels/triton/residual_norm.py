"""A branch added to the stream, the root-mean-square norm of the sum, and the gradient of both.

    s = x + y        n = s / sqrt(mean(s^2) + eps)        z = weight n
    dn = weight dz   dx = dy = ds + (dn - n mean(n dn)) / sqrt(mean(s^2) + eps)

A row is one token. The sum is rounded before it is normalised, as it is when others read it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.kernels.triton.adjacent import adjacent
from deltarule.kernels.triton.direct import launch
from deltarule.kernels.triton.gated_norm import options

# Rows whose share of d weight one program adds up.
ROWS = 8


@triton.jit
def residual_norm_kernel(
    x, y, weight, s, z, eps, s_x, s_y, V: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """One row."""
    r = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BV)
    m = o_v < V
    b_x = tl.load(x + r * s_x + o_v, mask=m, other=0.0).to(tl.float32)
    b_y = tl.load(y + r * s_y + o_v, mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_v, mask=m, other=0.0).to(tl.float32)
    b_rounded = (b_x + b_y).to(s.dtype.element_ty)
    tl.store(s + r * V + o_v, b_rounded, mask=m)
    b_s = b_rounded.to(tl.float32)
    b_z = b_s * tl.rsqrt(tl.sum(b_s * b_s) / V + eps) * b_w
    tl.store(z + r * V + o_v, b_z.to(z.dtype.element_ty), mask=m)


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def residual_norm_backward_kernel(
    d_s, d_z, s, weight, d_x, d_weight, rows, eps, s_ds, s_dz,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """ROWS rows, and their part of d weight; without SUM nobody else read the sum."""
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    b_w = tl.load(weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BV], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(ROWS):
        r = first + i
        m = m_v & (r < rows)
        b_s = tl.load(s + r * V + o_v, mask=m, other=0.0).to(tl.float32)
        b_dz = tl.load(d_z + r * s_dz + o_v, mask=m, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_s * b_s) / V + eps)
        b_n = b_s * b_r
        b_dw += b_dz * b_n
        b_dn = b_dz * b_w
        b_dx = b_r * (b_dn - b_n * (tl.sum(b_n * b_dn) / V))
        if SUM:
            b_dx += tl.load(d_s + r * s_ds + o_v, mask=m, other=0.0).to(tl.float32)
        tl.store(d_x + r * V + o_v, b_dx.to(d_x.dtype.element_ty), mask=m)
    tl.store(d_weight + tl.program_id(0) * V + o_v, b_dw, mask=m_v)


def residual_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s and z [M, V] of x and y [M, V], in the wider of their dtypes."""
    x, y, (rows, size) = adjacent(x), adjacent(y), x.shape
    dtype = torch.promote_types(x.dtype, y.dtype)
    s, z = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(2))
    width = triton.next_power_of_2(size)
    if s.numel():
        given = x, y, weight.contiguous(), s, z, eps, x.stride(0), y.stride(0)
        constants = {"V": size, "BV": width, **options(width)}
        launch(residual_norm_kernel, (rows, 1, 1), given, constants)
    return s, z


def residual_norm_backward(
    d_s: Tensor | None, d_z: Tensor, s: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient by x, which is that by y, and by weight; s [M, V] in one piece."""
    d_s, d_z, (rows, size) = None if d_s is None else adjacent(d_s), adjacent(d_z), s.shape
    d_x = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    width, programs = triton.next_power_of_2(size), triton.cdiv(rows, ROWS)
    d_weight = torch.empty(programs, size, device=s.device)
    if programs:
        given = (
            d_s, d_z, s, weight.contiguous(), d_x, d_weight, rows, eps,
            0 if d_s is None else d_s.stride(0), d_z.stride(0),
        )  # fmt: skip
        constants = {
            "V": size, "BV": width, "ROWS": ROWS, "SUM": d_s is not None, **options(width),
        }  # fmt: skip
        launch(residual_norm_backward_kernel, (programs, 1, 1), given, constants)
    return d_x, d_weight.sum(0).to(weight.dtype)
