"""The gradients of the short convolution: by x, by the taps and by the history.

    dx_t = sum_{s=0..R} weight_{R-s} dz_{t+s}        d weight_j = sum_t dz_t x_{t-R+j}

z is computed again from x, so that nothing but the inputs is kept for the backward.
"""

# Triton's compiler knows rows + (row,), not (*rows, row), and tuples that grow have no one type.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.kernels.triton.adjacent import adjacent
from deltarule.kernels.triton.direct import launch
from deltarule.kernels.triton.short_conv import (
    OPTIONS,
    Tiling,
    convolve,
    finish,
    history_row,
    later,
    load_taps,
    load_token,
    load_window,
    place,
    restart,
)
from deltarule.kernels.triton.unit_norm import EPSILON

# Runs in a tile, and tokens in a run; R tokens past each run are computed twice.
TILE = (1, 32)


@triton.jit
def give_back(b_dz, taps, pending, position, W: tl.constexpr, PACKED: tl.constexpr):
    """dz of a token to those before it that it saw, which wait for it."""
    given = ()
    for i in tl.static_range(W - 1):
        b_dx = tl.fma(b_dz, taps[i], pending[i])
        if PACKED:
            # The token W - 1 - i before may be of another sequence.
            b_dx = tl.where((position >= W - 1 - i)[:, None], b_dx, pending[i])
        given = given + (b_dx,)
    return given


@triton.jit
def add_taps(grads, b_dz, seen, W: tl.constexpr):
    """The gradients by the taps, and those of one more token."""
    summed = ()
    for i in tl.static_range(W):
        summed = summed + (tl.fma(b_dz, seen[i], grads[i]),)
    return summed


@triton.jit
def finish_gradient(b_z, b_dy, ACTIVATED: tl.constexpr, UNIT_NORM: tl.constexpr):
    """dz = SiLU'(z) dy, where the norm first makes dy = (dy - y (y . dy) / |y|^2) / |y|."""
    if UNIT_NORM:
        b_y = finish(b_z, ACTIVATED, False)
        b_r = tl.rsqrt(tl.sum(b_y * b_y, axis=1, keep_dims=True) + EPSILON)
        b_dy = b_r * (b_dy - b_y * (b_r * b_r * tl.sum(b_y * b_dy, axis=1, keep_dims=True)))
    if ACTIVATED:
        b_gate = tl.sigmoid(b_z)
        b_dy *= b_gate * (1 + b_z * (1 - b_gate))
    return b_dy


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["T", "N"])
def short_conv_backward_kernel(
    d_y, d_final, x, weight, history, cu_seqlens, sequence, counts, d_x, d_taps, T, D, N,
    s_b, s_t, s_dy_b, s_dy_t,
    W: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr, UNIT_NORM: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """dx of BG runs, and their part of d weight: each dz is given to the tokens that it saw."""
    i_t, i_d, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_c = tl.arange(0, BD)
    o_d = i_d * C + o_c
    m_d = ((o_c < C) & (o_d < D))[None, :]
    t = (i_t * BG + tl.arange(0, BG)) * RUN
    p_x, p_h = x + i_b.to(tl.int64) * s_b + o_d[None, :], history + o_d[None, :]
    p_dy = d_y + i_b.to(tl.int64) * s_dy_b + o_d[None, :]
    p_dx = d_x + i_b.to(tl.int64) * T * D + o_d[None, :]
    taps = load_taps(weight, o_d, D, W)
    n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, PACKED, PADDED)
    window = load_window(p_x, p_h, s_t, t, n, position, T, D, m_d, W)
    grads, pending = (), ()
    for _ in tl.static_range(W):
        grads = grads + (tl.zeros([BG, BD], tl.float32),)
    for _ in tl.static_range(W - 1):
        pending = pending + (tl.zeros([BG, BD], tl.float32),)
    b_x, b_dy = load_token(p_x, s_t, t, T, m_d), load_token(p_dy, s_dy_t, t, T, m_d)
    for j in range(RUN + W - 1):
        # Before the store, which no later load may pass.
        b_x_next, b_dy_next = (
            load_token(p_x, s_t, t + 1, T, m_d), load_token(p_dy, s_dy_t, t + 1, T, m_d)
        )  # fmt: skip
        if PACKED:
            n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, True, PADDED)
            window = restart(window, p_h, n, (position == 0) & (t < T), D, m_d, W)
        seen = window + (b_x.to(tl.float32),)
        b_z = convolve(seen, taps, W)
        b_dz = finish_gradient(b_z, b_dy.to(tl.float32), ACTIVATED, UNIT_NORM)
        # Those past the run are of the next one's sum.
        grads = add_taps(grads, tl.where(j < RUN, b_dz, 0.0), seen, W)
        b_dx = b_dz * taps[W - 1]
        if FINAL:
            r = position + W - 1 - count
            m_f = ((r >= 0) & (r < W - 1) & (t < T))[:, None] & m_d
            p_f = d_final + history_row(n, r, D, W) + o_d[None, :]
            b_dx += tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
        given = give_back(b_dz, taps, pending, position, W, PACKED) + (b_dx,)
        m_o = ((j >= W - 1) & (t - (W - 1) < T))[:, None] & m_d
        p_o = p_dx + (t - (W - 1)).to(tl.int64)[:, None] * D
        tl.store(p_o, given[0].to(d_x.dtype.element_ty), mask=m_o)
        pending, window, b_x, b_dy = later(given, W), later(seen, W), b_x_next, b_dy_next
        t += 1
        position += 1
    p_w = d_taps + (i_b * tl.num_programs(0) + i_t).to(tl.int64) * W * D + o_d
    for i in tl.static_range(W):
        tl.store(p_w + i * D, tl.sum(grads[i], axis=0), mask=(o_c < C) & (o_d < D))


@triton.jit(do_not_specialize=["T", "N"])
def history_gradient_kernel(
    d_y, d_final, x, weight, history, cu_seqlens, counts, d_history, T, D, N,
    s_b, s_t, s_dy_b, s_dy_t,
    W: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr, UNIT_NORM: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """d history_i = sum_{p=0..i} weight_{i-p} dz_p, over the first tokens p of a sequence."""
    n = tl.program_id(0) * BG + tl.arange(0, BG)
    o_c = tl.arange(0, BD)
    o_d = tl.program_id(1) * C + o_c
    m_d = ((o_c < C) & (o_d < D))[None, :]
    m_n = n < N
    t, tokens = 0 * n, T + 0 * n
    p_x, p_dy = x + o_d[None, :], d_y + o_d[None, :]
    p_h = history + o_d[None, :]
    if PACKED:
        t = tl.load(cu_seqlens + n, mask=m_n, other=0).to(tl.int32)
        tokens = tl.load(cu_seqlens + n + 1, mask=m_n, other=0).to(tl.int32) - t
    else:
        p_x += n.to(tl.int64)[:, None] * s_b
        p_dy += n.to(tl.int64)[:, None] * s_dy_b
    count = tokens
    if PADDED:
        count = tl.load(counts + n, mask=m_n, other=0).to(tl.int32)
    taps = load_taps(weight, o_d, D, W)
    window, grads = (), ()
    for i in tl.static_range(W - 1):
        m = m_n[:, None] & m_d
        b_h = tl.load(p_h + history_row(n, i, D, W), mask=m, other=0.0)
        window = window + (b_h.to(tl.float32),)
        b_dh = tl.zeros([BG, BD], tl.float32)
        if FINAL:
            r = i - count
            m = (m_n & (r >= 0) & (count >= 0))[:, None] & m_d
            p_f = d_final + history_row(n, r, D, W) + o_d[None, :]
            b_dh += tl.load(p_f, mask=m, other=0.0).to(tl.float32)
        grads = grads + (b_dh,)
    for p in tl.static_range(W - 1):
        m = (m_n & (p < tokens) & (t >= 0) & (t + p < T))[:, None] & m_d
        row = (t + p).to(tl.int64)[:, None]
        seen = window + (tl.load(p_x + row * s_t, mask=m, other=0.0).to(tl.float32),)
        b_dy = tl.load(p_dy + row * s_dy_t, mask=m, other=0.0).to(tl.float32)
        b_dz = finish_gradient(convolve(seen, taps, W), b_dy, ACTIVATED, UNIT_NORM)
        summed = ()
        for i in tl.static_range(W - 1):
            if i >= p:
                summed = summed + (tl.fma(b_dz, taps[i - p], grads[i]),)
            else:
                summed = summed + (grads[i],)
        grads, window = summed, later(seen, W)
    for i in tl.static_range(W - 1):
        p_o = d_history + history_row(n, i, D, W) + o_d[None, :]
        tl.store(p_o, grads[i].to(d_history.dtype.element_ty), mask=m_n[:, None] & m_d)


def short_conv_backward(
    d_y: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    history: Tensor,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
    counts: Tensor | None,
    activated: bool,
    head_size: int,
    wants_history: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, weight and history; that by history is empty where nobody wants it."""
    x, d_y, weight, history = adjacent(x), adjacent(d_y), weight.contiguous(), history.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    (batch, tokens, channels), (sequences, reach, _) = x.shape, history.shape
    strides = (*x.stride()[:2], *d_y.stride()[:2])
    options = {
        "W": reach + 1, "PACKED": cu_seqlens is not None, "PADDED": counts is not None,
        "ACTIVATED": activated, "UNIT_NORM": head_size > 0, "FINAL": d_final is not None, **OPTIONS,
    }  # fmt: skip
    tile = Tiling.of(max(tokens, 1), channels, head_size, TILE)
    blocks, columns = triton.cdiv(tokens, tile.BG * tile.RUN), triton.cdiv(channels, tile.C)
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_taps = torch.empty(batch * blocks, reach + 1, channels, device=x.device)
    if batch * blocks:
        given = (
            d_y, d_final, x, weight, history, cu_seqlens, sequence, counts, d_x, d_taps,
            tokens, channels, sequences, *strides,
        )  # fmt: skip
        constants = {**tile._asdict(), **options}
        launch(short_conv_backward_kernel, (blocks, columns, batch), given, constants)
    d_history = torch.empty_like(history if wants_history else history[:0])
    if d_history.numel():
        of_history = (
            d_y, d_final, x, weight, history, cu_seqlens, counts, d_history,
            tokens, channels, sequences, *strides,
        )  # fmt: skip
        constants = {"C": tile.C, "BD": tile.BD, "BG": tile.BG, **options}
        grid = triton.cdiv(sequences, tile.BG), columns, 1
        launch(history_gradient_kernel, grid, of_history, constants)
    return d_x, d_taps.sum(0).mT.to(weight.dtype).contiguous(), d_history
