"""Short convolutions of a few new tokens: three streams in one kernel, histories in place.

    y_t = SiLU(sum_{j=0..W-1} weight_j * x_{t-W+1+j})        history <- its last R = W - 1 inputs

The arithmetic is that of `short_conv_kernels_triton`, to the bit.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused import short_conv_kernels_triton as whole
from deltarule.ops.fused.short_conv_triton import OPTIONS
from deltarule.ops.runtime.chained import begin, chained, read_early, wait_for_last
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv

# Triton's compiler knows rows + (row,), not (*rows, row), and tuples that grow have no one type.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

CHANNELS = 128
# What the kernel calls its arguments of each stream.
OF_STREAM = "x", "w", "h", "y", "D", "s_b", "s_t", "ACTIVATED"
NAMES = [[f"{name}_{i}" for name in OF_STREAM] for i in range(3)]


class Stream(NamedTuple):
    """What one convolution is given.

    x: [B, T, D], channels side by side.
    weight: [D, W].
    history: [B, R, D] in x's dtype, contiguous. It is overwritten.
    activated: Whether SiLU follows.
    """

    x: Tensor
    weight: Tensor
    history: Tensor
    activated: bool


class Within(NamedTuple):
    """Convolutions of one token of each row within the product that makes q, k and v, in order.

    weights: [D, W] of each.
    histories: [N, R, D] of each in x's dtype. They are overwritten.
    activated: Whether SiLU follows.
    """

    weights: tuple[Tensor, ...]
    histories: tuple[Tensor, ...]
    activated: bool


# What is given of a stream, with the steps of its rows and tokens.
Given = namedtuple("Given", "x weight history y D s_b s_t")


@triton.jit
def convolve_tokens(
    of, i_d, i_b, T: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ACTIVATED: tl.constexpr,
    CHAINED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """C channels of one row; EARLY: histories are read before what the kernel waits for."""
    begin(CHAINED, EARLY)
    o_d = i_d * C + tl.arange(0, C)
    m_d = o_d < of.D
    taps = whole.load_taps(of.weight, o_d, of.D, W)
    p_h, n = of.history + o_d[None, :], i_b + tl.zeros([1], tl.int32)
    window = ()
    for r in tl.static_range(W - 1):
        b_h = tl.load(p_h + whole.history_row(n, r, of.D, W), mask=m_d[None, :], other=0.0)
        window = window + (b_h.to(tl.float32),)
    wait_for_last(EARLY)
    p_x = of.x + i_b.to(tl.int64) * of.s_b + o_d[None, :]
    p_y = of.y + i_b.to(tl.int64) * T * of.D + o_d[None, :]
    for _ in tl.static_range(T):
        b_x = tl.load(p_x, mask=m_d[None, :], other=0.0)
        seen = window + (b_x.to(tl.float32),)
        b_y = whole.finish(whole.convolve(seen, taps, W), ACTIVATED)
        tl.store(p_y, b_y.to(of.y.dtype.element_ty), mask=m_d[None, :])
        window = whole.later(seen, W)
        p_x += of.s_t
        p_y += of.D
    for r in tl.static_range(W - 1):
        b_h = window[r].to(of.history.dtype.element_ty)
        tl.store(p_h + whole.history_row(n, r, of.D, W), b_h, mask=m_d[None, :])


@triton.jit
def seen_before(o_o, o_n, m, first, taps, histories, sizes, W: tl.constexpr):
    """Of outputs [1, BO] from `first` on, all of one stream, and rows [BN, 1]: history and taps.

    With the place of its oldest row, the length of a row, and the outputs that have one.
    """
    p_w, p_h, start, D = taps[0], histories[0], 0, sizes[0]
    if first >= sizes[0] + sizes[1]:
        p_w, p_h, start, D = taps[2], histories[2], sizes[0] + sizes[1], sizes[2]
    elif first >= sizes[0]:
        p_w, p_h, start, D = taps[1], histories[1], sizes[0], sizes[1]
    o_d = o_o - start
    m_d = o_d < D
    p_h += o_n.to(tl.int64) * ((W - 1) * D) + o_d
    window, weights = (), ()
    for r in tl.static_range(W - 1):
        window = window + (tl.load(p_h + r * D, mask=m & m_d, other=0.0).to(tl.float32),)
    for j in tl.static_range(W):
        weights = weights + (tl.load(p_w + o_d * W + j, mask=m_d, other=0.0).to(tl.float32),)
    return window, weights, p_h, D, m_d


@triton.jit
def convolve_within(b_x, before, m, W: tl.constexpr, ACTIVATED: tl.constexpr):
    """Outputs [BN, BO], convolved after what was `seen_before`; the histories are overwritten."""
    window, weights, p_h, D, m_d = before
    seen = window + (b_x.to(p_h.dtype.element_ty).to(tl.float32),)
    b_y = whole.finish(whole.convolve(seen, weights, W), ACTIVATED)
    for r in tl.static_range(W - 1):
        tl.store(p_h + r * D, seen[r + 1].to(p_h.dtype.element_ty), mask=m & m_d)
    return tl.where(m_d, b_y, b_x)


def values_of(within: Within | None) -> dict[str, Any]:
    """What a kernel of products is given of them."""
    given = [(None, None)] * 3 if within is None else zip(*within[:2], strict=True)
    values: dict[str, Any] = {"W": 0, "EARLY": False, "ACTIVATED": False}
    for i, (weight, history) in enumerate(given):
        values |= {f"w_{i}": weight, f"h_{i}": history}
        values[f"D_{i}"] = 0 if weight is None else len(weight)
    if within is not None:
        early, taps = read_early(*within.histories), within.weights[0].shape[1]
        values |= {"W": taps, "EARLY": early, "ACTIVATED": within.activated}
    return values


@triton.jit
def convolution_step_kernel(
    x_0, w_0, h_0, y_0, x_1, w_1, h_1, y_1, x_2, w_2, h_2, y_2, D_0, D_1, D_2,
    s_b_0, s_t_0, s_b_1, s_t_1, s_b_2, s_t_2,
    T: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ACTIVATED_0: tl.constexpr,
    ACTIVATED_1: tl.constexpr, ACTIVATED_2: tl.constexpr, CHAINED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """C channels of one row of one stream; channels of the streams follow each other."""
    i_d, i_b = tl.program_id(0), tl.program_id(1)
    n_0, n_1 = tl.cdiv(D_0, C), tl.cdiv(D_1, C)
    if i_d < n_0:
        of = Given(x_0, w_0, h_0, y_0, D_0, s_b_0, s_t_0)
        convolve_tokens(of, i_d, i_b, T, W, C, ACTIVATED_0, CHAINED, EARLY)
    elif i_d < n_0 + n_1:
        i_d -= n_0
        of = Given(x_1, w_1, h_1, y_1, D_1, s_b_1, s_t_1)
        convolve_tokens(of, i_d, i_b, T, W, C, ACTIVATED_1, CHAINED, EARLY)
    else:
        i_d -= n_0 + n_1
        of = Given(x_2, w_2, h_2, y_2, D_2, s_b_2, s_t_2)
        convolve_tokens(of, i_d, i_b, T, W, C, ACTIVATED_2, CHAINED, EARLY)


def convolution_step(streams: tuple[Stream, Stream, Stream]) -> tuple[Tensor, ...]:
    """y [B, T, D] of each stream, all of as many taps; the histories are overwritten."""
    batch, tokens, _ = streams[0].x.shape
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x, *_ in streams]
    values: dict[str, Any] = {"T": tokens, "C": CHANNELS, **chained(), **OPTIONS}
    values |= {"W": streams[0].weight.shape[1], "EARLY": read_early(*[x.history for x in streams])}
    for names, (x, weight, history, activated), y in zip(NAMES, streams, outputs, strict=True):
        s_b, s_t, _ = x.stride()
        of_stream = x, weight, history, y, x.shape[2], s_b, s_t, activated
        values.update(zip(names, of_stream, strict=True))
    grid = sum(cdiv(x.shape[2], CHANNELS) for x, *_ in streams), batch, 1
    launch(convolution_step_kernel, grid, values)
    return tuple(outputs)
