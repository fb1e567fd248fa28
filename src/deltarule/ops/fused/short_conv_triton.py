"""A short causal convolution over time, then SiLU if it is asked for, with their gradient.

    z_t = sum_{j=0..W-1} weight_j * x_{t-W+1+j}      y_t = SiLU(z_t)

Before a sequence's first token come the R = W - 1 rows of its history, or zeros. A program keeps
the last R inputs of BG runs of RUN tokens in registers, so that x is read and y written once.
"""

from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused.parts_triton import sum_of_parts
from deltarule.ops.fused.short_conv import ShortConv, ShortConvs
from deltarule.ops.fused_kernels import adjacent
from deltarule.ops.registration import Backward, Gradients
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.replay import Recorded
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Triton's compiler knows rows + (row,), not (*rows, row), and tuples that grow have no one type.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"


# Fused only where `tl.fma` says so: of a step's products and sums the compiler would fuse others
# than of the whole's, and the bits would differ. Written out, since Triton's default follows an
# environment variable.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": False, "num_warps": 1}
CHANNELS = 128
WHOLE = torch.contiguous_format
# Runs in a tile, and tokens in a run.
TILE = (1, 16)


@triton.jit
def place(t, i_b, T, N, cu_seqlens, sequence, counts, PACKED: tl.constexpr, PADDED: tl.constexpr):
    """For each token: its sequence, its position in it, and the sequence's length."""
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
    """Address of row r of sequence n in a tensor [N, R, D]."""
    return (n * (W - 1) + r).to(tl.int64)[:, None] * D


@triton.jit
def load_history(history, n, r, o_d, D, m, W: tl.constexpr):
    """Row r of sequence n, or zeros where there is no history."""
    b_h = tl.zeros(m.shape, tl.float32)
    if history is not None:
        b_h = tl.load(history + o_d[None, :] + history_row(n, r, D, W), mask=m, other=0.0)
    return b_h


@triton.jit
def load_taps(weight, o_d, D, W: tl.constexpr):
    """The W taps of each channel, [1, C] in float32."""
    taps = ()
    for j in tl.static_range(W):
        b_w = tl.load(weight + o_d * W + j, mask=o_d < D, other=0.0)
        taps = taps + (b_w.to(tl.float32)[None, :],)
    return taps


@triton.jit
def load_window(p_x, history, s_t, t, n, position, o_d, T, D, m_d, W: tl.constexpr):
    """The R inputs before each token, the oldest first, from the row or from the history."""
    window = ()
    for i in tl.static_range(W - 1):
        shift = W - 1 - i
        inside = (position >= shift) & (t >= shift) & (t < T)
        b_x = tl.load(
            p_x + (t - shift).to(tl.int64)[:, None] * s_t, mask=inside[:, None] & m_d, other=0.0
        )
        before = (position >= 0) & (position < shift) & (t < T)
        m = before[:, None] & m_d
        b_h = load_history(history, n, W - 1 - shift + position, o_d, D, m, W)
        window = window + (b_x.to(tl.float32) + b_h.to(tl.float32),)
    return window


@triton.jit
def load_token(p_x, s_t, t, T, m_d):
    """One token of each run, zeros past the last."""
    return tl.load(p_x + t.to(tl.int64)[:, None] * s_t, mask=(t < T)[:, None] & m_d, other=0.0)


@triton.jit
def restart(window, history, n, first, o_d, D, m_d, W: tl.constexpr):
    """The window, or a sequence's history where its first token comes."""
    restarted = ()
    for i in tl.static_range(W - 1):
        b_h = load_history(history, n, i, o_d, D, first[:, None] & m_d, W).to(tl.float32)
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
def finish(b_z, ACTIVATED: tl.constexpr):
    """y = SiLU(z)."""
    return b_z / (1 + tl.exp(-b_z)) if ACTIVATED else b_z


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["T", "N", "blocks"])
def short_conv_kernel(
    x, weight, history, cu_seqlens, sequence, counts, y, final, T, D, N, blocks, s_b, s_t,
    W: tl.constexpr, C: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    """BG runs of tokens of C channels; programs past the tokens' blocks hand on the history."""
    i_t, i_d, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_d * C + tl.arange(0, C)
    m_d = (o_d < D)[None, :]
    p_f = final + o_d[None, :]
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
            b_h = load_history(history, n, count + r, o_d, D, m, W)
            tl.store(p_f + history_row(n, r, D, W), b_h, mask=m)
        return
    t = (i_t * BG + tl.arange(0, BG)) * RUN
    p_x = x + i_b.to(tl.int64) * s_b + o_d[None, :]
    p_y = y + i_b.to(tl.int64) * T * D + o_d[None, :]
    taps = load_taps(weight, o_d, D, W)
    n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, PACKED, PADDED)
    window = load_window(p_x, history, s_t, t, n, position, o_d, T, D, m_d, W)
    b_given = load_token(p_x, s_t, t, T, m_d)
    for j in tl.static_range(RUN):
        # Before the stores, which no later load may pass.
        b_next = b_given
        if j < RUN - 1:
            b_next = load_token(p_x, s_t, t + 1, T, m_d)
        if PACKED and j > 0:
            n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, True, PADDED)
            first = (position == 0) & (t < T)
            window = restart(window, history, n, first, o_d, D, m_d, W)
        seen = window + (b_given.to(tl.float32),)
        b_y = finish(convolve(seen, taps, W), ACTIVATED)
        m = (t < T)[:, None] & m_d
        tl.store(p_y + t.to(tl.int64)[:, None] * D, b_y.to(y.dtype.element_ty), mask=m)
        r = position + W - 1 - count
        m_f = ((r >= 0) & (r < W - 1) & (t < T))[:, None] & m_d
        tl.store(p_f + history_row(n, r, D, W), b_given, mask=m_f)
        window, b_given = later(seen, W), b_next
        t += 1
        position += 1


class Tiling(NamedTuple):
    """Channels of a program, runs in a tile and tokens in a run."""

    C: int
    BG: int
    RUN: int

    @classmethod
    def of(cls, tokens: int, channels: int, tile: tuple[int, int]) -> "Tiling":
        """Short runs for the few tokens of a step."""
        size = min(CHANNELS, power_of_2(channels))
        run = min(tile[1], power_of_2(tokens))
        runs = min(tile[0], power_of_2(cdiv(tokens, run)))
        return cls(size, runs, run)


@Recorded
def short_conv(inputs: ShortConv) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the last R inputs of each sequence [N, R, D]."""
    (batch, tokens, channels), sequences = inputs.x.shape, inputs.sequences
    tile = Tiling.of(max(tokens, 1), channels, TILE)
    values = arguments(inputs, tile)
    y = torch.empty_like(inputs.x, memory_format=WHOLE)
    final = y.new_empty(sequences, values["W"] - 1, channels)
    blocks = cdiv(tokens, tile.BG * tile.RUN)
    extra = 0
    if final.numel():
        extra = 1 if inputs.cu_seqlens is None else cdiv(sequences, tile.BG)
    if batch * (blocks + extra):
        grid = blocks + extra, cdiv(channels, tile.C), batch
        launch(short_conv_kernel, grid, values | {"y": y, "final": final, "blocks": blocks})
    return y, final


@Recorded
def short_convs(inputs: ShortConvs) -> tuple[Tensor, ...]:
    """y of each stream, then the last inputs of each."""
    return tuple(chain(*zip(*map(short_conv.run, inputs.streams), strict=True)))


def arguments(inputs: ShortConv, tile: Tiling) -> dict[str, Any]:
    """What the kernels are given of a call, and what they are compiled for."""
    x, weight = adjacent(inputs.x), inputs.weight.contiguous()
    _, tokens, channels = x.shape
    values = {**inputs._asdict(), **tile._asdict(), **OPTIONS, "x": x, "weight": weight}
    history = None if inputs.history is None else inputs.history.contiguous()
    values |= {"history": history, "W": weight.shape[1]}
    values |= {"T": tokens, "D": channels, "N": inputs.sequences}
    values |= {"s_b": x.stride(0), "s_t": x.stride(1)}
    values |= {"PACKED": inputs.cu_seqlens is not None, "PADDED": inputs.counts is not None}
    return values | {"ACTIVATED": inputs.activated}


# The gradients of the short convolution: by x, by the taps and by the history.
#
#     dx_t = sum_{s=0..R} weight_{R-s} dz_{t+s}        d weight_j = sum_t dz_t x_{t-R+j}
#
# z is computed again from x, so that nothing but the inputs is kept for the backward.


# Runs in a tile, and tokens in a run; R tokens past each run are computed twice.
BACKWARD_TILE = (1, 32)


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
def finish_gradient(b_z, b_dy, ACTIVATED: tl.constexpr):
    """dz = SiLU'(z) dy."""
    if ACTIVATED:
        b_gate = tl.sigmoid(b_z)
        b_dy *= b_gate * (1 + b_z * (1 - b_gate))
    return b_dy


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["T", "N"])
def short_conv_backward_kernel(
    d_y, d_final, x, weight, history, cu_seqlens, sequence, counts, d_x, d_taps, T, D, N,
    s_b, s_t, s_dy_b, s_dy_t,
    W: tl.constexpr, C: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """dx of BG runs, and their part of d weight: each dz is given to the tokens that it saw."""
    i_t, i_d, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_d * C + tl.arange(0, C)
    m_d = (o_d < D)[None, :]
    t = (i_t * BG + tl.arange(0, BG)) * RUN
    p_x = x + i_b.to(tl.int64) * s_b + o_d[None, :]
    p_dy = d_y + i_b.to(tl.int64) * s_dy_b + o_d[None, :]
    p_dx = d_x + i_b.to(tl.int64) * T * D + o_d[None, :]
    taps = load_taps(weight, o_d, D, W)
    n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, PACKED, PADDED)
    window = load_window(p_x, history, s_t, t, n, position, o_d, T, D, m_d, W)
    grads, pending = (), ()
    for _ in tl.static_range(W):
        grads = grads + (tl.zeros([BG, C], tl.float32),)
    for _ in tl.static_range(W - 1):
        pending = pending + (tl.zeros([BG, C], tl.float32),)
    b_x, b_dy = load_token(p_x, s_t, t, T, m_d), load_token(p_dy, s_dy_t, t, T, m_d)
    for j in range(RUN + W - 1):
        # Before the store, which no later load may pass.
        b_x_next = load_token(p_x, s_t, t + 1, T, m_d)
        b_dy_next = load_token(p_dy, s_dy_t, t + 1, T, m_d)
        if PACKED:
            n, position, count = place(t, i_b, T, N, cu_seqlens, sequence, counts, True, PADDED)
            first = (position == 0) & (t < T)
            window = restart(window, history, n, first, o_d, D, m_d, W)
        seen = window + (b_x.to(tl.float32),)
        b_z = convolve(seen, taps, W)
        b_dz = finish_gradient(b_z, b_dy.to(tl.float32), ACTIVATED)
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
        tl.store(p_w + i * D, tl.sum(grads[i], axis=0), mask=o_d < D)


@triton.jit(do_not_specialize=["T", "N"])
def history_gradient_kernel(
    d_y, d_final, x, weight, history, cu_seqlens, counts, d_history, T, D, N,
    s_b, s_t, s_dy_b, s_dy_t,
    W: tl.constexpr, C: tl.constexpr, BG: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """d history_i = sum_{p=0..i} weight_{i-p} dz_p, over the first tokens p of a sequence."""
    n = tl.program_id(0) * BG + tl.arange(0, BG)
    o_d = tl.program_id(1) * C + tl.arange(0, C)
    m_d = (o_d < D)[None, :]
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
        b_dh = tl.zeros([BG, C], tl.float32)
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
        b_dz = finish_gradient(convolve(seen, taps, W), b_dy, ACTIVATED)
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


def short_conv_backward(given: Backward[ShortConv]) -> Gradients:
    """Gradients by x, by weight and, where it is wanted, by history."""
    (d_y, d_final), inputs = given.gradients, given.inputs
    d_y = torch.zeros_like(inputs.x) if d_y is None else d_y
    return short_conv_gradients(inputs, d_y, d_final, given.wanted[2])


def short_convs_backward(given: Backward[ShortConvs]) -> Gradients:
    """The same of each stream."""
    inputs = given.inputs
    pairs = zip(inputs[:3], given.gradients[:3], strict=True)
    d_y = [torch.zeros_like(x) if d is None else d for x, d in pairs]
    return short_convs_gradients(inputs, *d_y, *given.gradients[3:], *given.wanted[6:])


@Recorded
def short_conv_gradients(
    inputs: ShortConv, d_y: Tensor, d_final: Tensor | None, wants_history: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same from the gradients by both outputs."""
    (batch, tokens, channels), history = inputs.x.shape, inputs.history
    tile = Tiling.of(max(tokens, 1), channels, BACKWARD_TILE)
    values, d_y = arguments(inputs, tile), adjacent(d_y)
    values |= {"d_y": d_y, "s_dy_b": d_y.stride(0), "s_dy_t": d_y.stride(1)}
    values |= {"d_final": None if d_final is None else d_final.contiguous()}
    values["FINAL"] = d_final is not None
    blocks, columns = cdiv(tokens, tile.BG * tile.RUN), cdiv(channels, tile.C)
    d_x = torch.empty_like(inputs.x, memory_format=WHOLE)
    shape = batch * blocks, values["W"], channels
    d_taps = torch.empty(shape, dtype=torch.float32, device=d_x.device)
    if batch * blocks:
        given = values | {"d_x": d_x, "d_taps": d_taps}
        launch(short_conv_backward_kernel, (blocks, columns, batch), given)
    d_weight = sum_of_parts(d_taps, inputs.weight, values["W"])
    if history is None or not wants_history:
        return d_x, d_weight, None
    d_history = torch.empty_like(history, memory_format=WHOLE)
    if d_history.numel():
        grid = cdiv(len(history), tile.BG), columns, 1
        launch(history_gradient_kernel, grid, values | {"d_history": d_history})
    return d_x, d_weight, d_history


@Recorded
def short_convs_gradients(inputs: ShortConvs, *given: Any) -> tuple[Tensor | None, ...]:
    """The same of each stream: all x, all taps, all histories; given are d_y, d_final and wants."""
    parts = given[:3], given[3:6], given[6:]
    found = map(short_conv_gradients.run, inputs.streams, *parts)
    return tuple(chain(*zip(*found, strict=True)))
