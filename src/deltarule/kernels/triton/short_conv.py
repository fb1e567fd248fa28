"""A short causal convolution over time, SiLU, and the unit norm of each head, with their gradient.

    z_t = sum_{j=0..W-1} weight_j * x_{t-W+1+j}      y_t = SiLU(z_t)      y_t / |y_t| over a head

SiLU and the norm are options.

Before a sequence's first token come the R = W - 1 rows of its history. A program keeps the last
R inputs of BG runs of RUN tokens in registers, so that x is read and y written once.
"""

# Triton's compiler knows rows + (row,), not (*rows, row), and tuples that grow have no one type.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.kernels.triton.adjacent import adjacent
from deltarule.kernels.triton.direct import launch
from deltarule.kernels.triton.unit_norm import EPSILON

# Fused only where `tl.fma` says so: of a step's products and sums the compiler would fuse others
# than of the whole's, and the bits would differ. Written out, since Triton's default follows an
# environment variable.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": False, "num_warps": 1}
CHANNELS = 128
# Runs in a tile, and tokens in a run.
TILE = (1, 16)


@triton.jit
def place(
    t, i_b, T, N, cu_seqlens, sequence, counts, PACKED: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Of each token: its sequence, its position in that, and the real tokens of that."""
    n, position, count = i_b + 0 * t, t, T + 0 * t
    if PACKED:
        n = tl.load(sequence + t, mask=(t >= 0) & (t < T), other=0).to(tl.int32)
        # Offsets are not checked on a GPU: wrong ones may not lead out of the tensors.
        n = tl.maximum(tl.minimum(n, N - 1), 0)
        start = tl.load(cu_seqlens + n).to(tl.int32)
        position, count = t - start, tl.load(cu_seqlens + n + 1).to(tl.int32) - start
    if PADDED:
        count = tl.load(counts + n).to(tl.int32)
    return n, position, count


@triton.jit
def history_row(n, r, D, W: tl.constexpr):
    """Where row r of sequence n begins in a tensor [N, R, D]."""
    return (n * (W - 1) + r).to(tl.int64)[:, None] * D


@triton.jit
def load_taps(weight, o_d, D, W: tl.constexpr):
    """The W taps of each channel, [1, BD] in float32."""
    taps = ()
    for j in tl.static_range(W):
        b_w = tl.load(weight + o_d * W + j, mask=o_d < D, other=0.0)
        taps = taps + (b_w.to(tl.float32)[None, :],)
    return taps


@triton.jit
def load_window(p_x, p_h, s_t, t, n, position, T, D, m_d, W: tl.constexpr):
    """The R inputs before each token, the oldest first, from the row or from the history."""
    window = ()
    for i in tl.static_range(W - 1):
        shift = W - 1 - i
        inside = (position >= shift) & (t >= shift) & (t < T)
        b_x = tl.load(
            p_x + (t - shift).to(tl.int64)[:, None] * s_t, mask=inside[:, None] & m_d, other=0.0
        )
        before = (position >= 0) & (position < shift) & (t < T)
        p = p_h + history_row(n, W - 1 - shift + position, D, W)
        b_h = tl.load(p, mask=before[:, None] & m_d, other=0.0)
        window = window + (b_x.to(tl.float32) + b_h.to(tl.float32),)
    return window


@triton.jit
def load_token(p_x, s_t, t, T, m_d):
    """One token of each run, zeros past the last."""
    return tl.load(p_x + t.to(tl.int64)[:, None] * s_t, mask=(t < T)[:, None] & m_d, other=0.0)


@triton.jit
def restart(window, p_h, n, first, D, m_d, W: tl.constexpr):
    """The window, or a sequence's history where its first token comes."""
    restarted = ()
    for i in tl.static_range(W - 1):
        p = p_h + history_row(n, i, D, W)
        b_h = tl.load(p, mask=first[:, None] & m_d, other=0.0).to(tl.float32)
        restarted = restarted + (tl.where(first[:, None], b_h, window[i]),)
    return restarted


@triton.jit
def later(rows, W: tl.constexpr):
    """All but the oldest of W rows."""
    kept = ()
    for i in tl.static_range(1, W):
        kept = kept + (rows[i],)
    return kept


@triton.jit
def convolve(seen, taps, W: tl.constexpr):
    """z = sum_j weight_j x_j, for the W rows that a token sees."""
    b_z = seen[0] * taps[0]
    for j in tl.static_range(1, W):
        b_z = tl.fma(seen[j], taps[j], b_z)
    return b_z


@triton.jit
def finish(b_z, ACTIVATED: tl.constexpr, UNIT_NORM: tl.constexpr):
    """y = SiLU(z), divided by its length."""
    b_y = b_z
    if ACTIVATED:
        b_y = b_z / (1 + tl.exp(-b_z))
    if UNIT_NORM:
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, axis=1, keep_dims=True) + EPSILON)
    return b_y


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["T", "N", "blocks"])
def short_conv_kernel(
    x, weight, history, cu_seqlens, sequence, counts, y, final, T, D, N, blocks, s_b, s_t,
    W: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr, UNIT_NORM: tl.constexpr,
):  # fmt: skip
    """BG runs of tokens of C channels; programs past the tokens' blocks hand on the history."""
    i_t, i_d, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_c = tl.arange(0, BD)
    o_d = i_d * C + o_c
    m_d = ((o_c < C) & (o_d < D))[None, :]
    p_h, p_f = history + o_d[None, :], final + o_d[None, :]
    if i_t >= blocks:
        # Sequences shorter than the window leave some of the history that they were given.
        n = i_b + (i_t - blocks) * BG + tl.arange(0, BG)
        count, last = T + 0 * n, i_b
        if PACKED:
            last = i_b + N - 1
        m_n = n <= last
        if PACKED:
            count = tl.load(cu_seqlens + n + 1, mask=m_n, other=0).to(tl.int32)
            count -= tl.load(cu_seqlens + n, mask=m_n, other=0).to(tl.int32)
        if PADDED:
            count = tl.load(counts + n, mask=m_n, other=0).to(tl.int32)
        for r in tl.static_range(W - 1):
            m = (m_n & (count >= 0) & (count + r < W - 1))[:, None] & m_d
            b_h = tl.load(p_h + history_row(n, count + r, D, W), mask=m, other=0.0)
            tl.store(p_f + history_row(n, r, D, W), b_h, mask=m)
        return
    t = (i_t * BG + tl.arange(0, BG)) * RUN
    p_x = x + i_b.to(tl.int64) * s_b + o_d[None, :]
    p_y = y + i_b.to(tl.int64) * T * D + o_d[None, :]
    taps = load_taps(weight, o_d, D, W)
    n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, PACKED, PADDED)
    window = load_window(p_x, p_h, s_t, t, n, position, T, D, m_d, W)
    b_given = load_token(p_x, s_t, t, T, m_d)
    for j in tl.static_range(RUN):
        # Before the stores, which no later load may pass.
        b_next = b_given
        if j < RUN - 1:
            b_next = load_token(p_x, s_t, t + 1, T, m_d)
        if PACKED and j > 0:
            n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, True, PADDED)
            window = restart(window, p_h, n, (position == 0) & (t < T), D, m_d, W)
        seen = window + (b_given.to(tl.float32),)
        b_y = finish(convolve(seen, taps, W), ACTIVATED, UNIT_NORM)
        m = (t < T)[:, None] & m_d
        tl.store(p_y + t.to(tl.int64)[:, None] * D, b_y.to(y.dtype.element_ty), mask=m)
        r = position + W - 1 - count
        m_f = ((r >= 0) & (r < W - 1) & (t < T))[:, None] & m_d
        tl.store(p_f + history_row(n, r, D, W), b_given, mask=m_f)
        window, b_given = later(seen, W), b_next
        t += 1
        position += 1


class Tiling(NamedTuple):
    """Channels of a program and their power of two, runs in a tile and tokens in a run."""

    C: int
    BD: int
    BG: int
    RUN: int

    @classmethod
    def of(cls, tokens: int, channels: int, head_size: int, tile: tuple[int, int]) -> "Tiling":
        """Whole heads where they are normalised; short runs for the few tokens of a step."""
        size = head_size or min(CHANNELS, triton.next_power_of_2(channels))
        run = min(tile[1], triton.next_power_of_2(tokens))
        runs = min(tile[0], triton.next_power_of_2(triton.cdiv(tokens, run)))
        return cls(size, triton.next_power_of_2(size), runs, run)


def short_conv(
    x: Tensor,
    weight: Tensor,
    history: Tensor,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
    counts: Tensor | None,
    activated: bool,
    head_size: int,
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the last R inputs of each sequence [N, R, D]."""
    x, weight, history = adjacent(x), weight.contiguous(), history.contiguous()
    (batch, tokens, channels), sequences = x.shape, history.shape[0]
    y, final = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(history)
    tile = Tiling.of(max(tokens, 1), channels, head_size, TILE)
    blocks = triton.cdiv(tokens, tile.BG * tile.RUN)
    extra = 0
    if final.numel():
        extra = 1 if cu_seqlens is None else triton.cdiv(sequences, tile.BG)
    if batch * (blocks + extra):
        given = (
            x, weight, history, cu_seqlens, sequence, counts, y, final,
            tokens, channels, sequences, blocks, *x.stride()[:2],
        )  # fmt: skip
        constants = {
            "W": weight.shape[1], **tile._asdict(), "PACKED": cu_seqlens is not None,
            "PADDED": counts is not None, "ACTIVATED": activated, "UNIT_NORM": head_size > 0,
            **OPTIONS,
        }  # fmt: skip
        grid = blocks + extra, triton.cdiv(channels, tile.C), batch
        launch(short_conv_kernel, grid, given, constants)
    return y, final
