"""A short causal convolution over time, then SiLU if it is asked for, with their gradients.

    z_t = sum_{j=0..W-1} weight_j * x_{t-W+1+j}      y_t = SiLU(z_t)
    dx_t = sum_{s=0..R} weight_{R-s} dz_{t+s}        d weight_j = sum_t dz_t x_{t-R+j}

Before a sequence's first token come the R = W - 1 rows of its history, or zeros. A program reads
BG runs of RUN tokens, each by a warp of its own: many tokens at once, since what is on its way
bounds the speed, and each of them once, since the last R stay in registers. The backward computes z
again from x. Up to three streams of different channels follow each other in a grid.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.fused.norms_triton import sigmoid
from deltarule.ops.fused.parts_triton import block_of, pick, pick_all

# Triton's compiler knows rows + (row,), not (*rows, row), and tuples that grow have no one type.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"


# A row of tokens and its sequences; what is before these, gradients by their last inputs, channels.
Row = namedtuple("Row", "i_b T N cu_seqlens sequence counts history d_final o_d D m_d")


@triton.jit
def place(t, row, PACKED: tl.constexpr, PADDED: tl.constexpr):
    """For each token: its sequence, its position in it, and the sequence's length."""
    n, position, count = row.i_b + 0 * t, t, row.T + 0 * t
    if PACKED:
        n = tl.load(row.sequence + t, mask=(t >= 0) & (t < row.T), other=0).to(tl.int32)
        # Offsets are not checked on a GPU: wrong ones may not lead out of the tensors.
        n = tl.maximum(tl.minimum(n, row.N - 1), 0)
        start = tl.load(row.cu_seqlens + n).to(tl.int32)
        position, count = t - start, tl.load(row.cu_seqlens + n + 1).to(tl.int32) - start
    if PADDED:
        count = tl.load(row.counts + n).to(tl.int32)
    return n, position, count


@triton.jit
def history_row(n, r, D, W: tl.constexpr):
    """Address of row r of sequence n in a tensor [N, R, D]."""
    return (n * (W - 1) + r).to(tl.int64)[:, None] * D


@triton.jit
def load_history(history, n, r, o_d, D, m, W: tl.constexpr):
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
def rows_at(p_x, t, s_t):
    """Addresses of token t of each run."""
    return p_x + t.to(tl.int64)[:, None] * s_t


@triton.jit
def load_tokens(p, s_t, t, T, m_d, ROWS: tl.constexpr):
    """ROWS tokens of each run from token t at p on, zeros past the last."""
    rows = ()
    for j in tl.static_range(ROWS):
        rows = rows + (tl.load(p, mask=(t + j < T)[:, None] & m_d, other=0.0),)
        p += s_t
    return rows


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
    return b_z * sigmoid(b_z) if ACTIVATED else b_z


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["T", "N", "blocks"])
def short_conv_kernel(
    x_0, weight_0, history_0, y_0, final_0, x_1, weight_1, history_1, y_1, final_1,
    x_2, weight_2, history_2, y_2, final_2, D_0, s_b_0, s_t_0, D_1, s_b_1, s_t_1, D_2, s_b_2, s_t_2,
    cu_seqlens, sequence, counts, T, N, blocks,
    W: tl.constexpr, C: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    """BG runs of tokens of C channels; programs past the tokens' blocks keep the last ones."""
    i_t, i_b = tl.program_id(0), tl.program_id(2)
    i_s, i_d = block_of(tl.program_id(1), D_0, D_1, C)
    x, weight, y, final, D, s_b, s_t = pick_all(
        i_s,
        (x_0, weight_0, y_0, final_0, D_0, s_b_0, s_t_0),
        (x_1, weight_1, y_1, final_1, D_1, s_b_1, s_t_1),
        (x_2, weight_2, y_2, final_2, D_2, s_b_2, s_t_2),
    )
    history = pick(i_s, history_0, history_1, history_2)
    o_d = i_d * C + tl.arange(0, C)
    m_d = (o_d < D)[None, :]
    x += i_b.to(tl.int64) * s_b
    if i_t >= blocks:
        # Sequences shorter than the window hand on some of the history that they were given.
        n = i_b + (i_t - blocks) * BG + tl.arange(0, BG)
        m_n, begin, count = n == i_b, 0 * n, T + 0 * n
        if PACKED:
            m_n = n < N
            begin = tl.load(cu_seqlens + n, mask=m_n, other=0).to(tl.int32)
            count = tl.load(cu_seqlens + n + 1, mask=m_n, other=0).to(tl.int32) - begin
        if PADDED:
            count = tl.load(counts + n, mask=m_n, other=0).to(tl.int32)
        m_n &= count >= 0
        for r in tl.static_range(W - 1):
            t = begin + count + r - (W - 1)
            inside = m_n & (count + r >= W - 1) & (t >= 0) & (t < T)
            b_x = tl.load(rows_at(x + o_d[None, :], t, s_t), mask=inside[:, None] & m_d, other=0.0)
            m = (m_n & (count + r < W - 1))[:, None] & m_d
            b_h = load_history(history, n, count + r, o_d, D, m, W).to(b_x.dtype)
            p_f = final + history_row(n, r, D, W) + o_d[None, :]
            tl.store(p_f, tl.where(inside[:, None], b_x, b_h), mask=m_n[:, None] & m_d)
        return
    t = (i_t * BG + tl.arange(0, BG)) * RUN
    p_x = x + o_d[None, :]
    p_y = y + i_b.to(tl.int64) * T * D + o_d[None, :]
    taps = load_taps(weight, o_d, D, W)
    row = Row(i_b, T, N, cu_seqlens, sequence, counts, history, None, o_d, D, m_d)
    n, position, _ = place(t, row, PACKED, PADDED)
    window = load_window(p_x, history, s_t, t, n, position, o_d, T, D, m_d, W)
    # All before the first store, which no later load may pass.
    given = load_tokens(rows_at(p_x, t, s_t), s_t, t, T, m_d, RUN)
    p_y = rows_at(p_y, t, D)
    for j in tl.static_range(RUN):
        if PACKED and j > 0:
            n, position, _ = place(t, row, True, PADDED)
            first = (position == 0) & (t < T)
            window = restart(window, history, n, first, o_d, D, m_d, W)
        seen = window + (given[j].to(tl.float32),)
        b_y = finish(convolve(seen, taps, W), ACTIVATED)
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=(t < T)[:, None] & m_d)
        window = later(seen, W)
        p_y += D
        t += 1


@triton.jit
def zeros(COUNT: tl.constexpr, BG: tl.constexpr, C: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([BG, C], tl.float32),)
    return tiles


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
        b_gate = sigmoid(b_z)
        b_dy *= b_gate * tl.fma(b_z, 1 - b_gate, 1.0)
    return b_dy


@triton.jit
def step_back(
    b_x, b_dy, window, pending, taps, t, row, W: tl.constexpr, PACKED: tl.constexpr,
    PADDED: tl.constexpr, ACTIVATED: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """dz of a token, what it saw, and dx of R + 1 tokens: of the first all, of the others parts."""
    if PACKED or FINAL:
        n, position, count = place(t, row, PACKED, PADDED)
    if PACKED:
        first = (position == 0) & (t < row.T)
        window = restart(window, row.history, n, first, row.o_d, row.D, row.m_d, W)
    seen = window + (b_x.to(tl.float32),)
    b_dz = finish_gradient(convolve(seen, taps, W), b_dy.to(tl.float32), ACTIVATED)
    given = ()
    for i in tl.static_range(W - 1):
        b_dx = tl.fma(b_dz, taps[i], pending[i])
        if PACKED:
            # The token W - 1 - i before may be of another sequence.
            b_dx = tl.where((position >= W - 1 - i)[:, None], b_dx, pending[i])
        given = given + (b_dx,)
    b_last = b_dz * taps[W - 1]
    if FINAL:
        # If the token is one of the last inputs, row r of these.
        r = position + W - 1 - count
        m = ((r >= 0) & (r < W - 1) & (t < row.T))[:, None] & row.m_d
        p_f = row.d_final + history_row(n, r, row.D, W) + row.o_d[None, :]
        b_last += tl.load(p_f, mask=m, other=0.0).to(tl.float32)
    return b_dz, seen, given + (b_last,)


# Lengths change from call to call; none is worth a kernel of its own.
@triton.jit(do_not_specialize=["T", "N"])
def short_conv_backward_kernel(
    x_0, weight_0, history_0, d_y_0, d_final_0, d_x_0, d_taps_0,
    x_1, weight_1, history_1, d_y_1, d_final_1, d_x_1, d_taps_1,
    x_2, weight_2, history_2, d_y_2, d_final_2, d_x_2, d_taps_2,
    D_0, s_b_0, s_t_0, s_dy_b_0, s_dy_t_0, s_dx_b_0, s_dx_t_0,
    D_1, s_b_1, s_t_1, s_dy_b_1, s_dy_t_1, s_dx_b_1, s_dx_t_1,
    D_2, s_b_2, s_t_2, s_dy_b_2, s_dy_t_2, s_dx_b_2, s_dx_t_2,
    cu_seqlens, sequence, counts, T, N,
    W: tl.constexpr, C: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr, AT_ONCE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, ACTIVATED: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """dx of BG runs, and their part of d weight: each dz is given to the tokens that it saw."""
    i_t, i_b = tl.program_id(0), tl.program_id(2)
    i_s, i_d = block_of(tl.program_id(1), D_0, D_1, C)
    x, weight, d_y, d_x, d_taps = pick_all(
        i_s,
        (x_0, weight_0, d_y_0, d_x_0, d_taps_0),
        (x_1, weight_1, d_y_1, d_x_1, d_taps_1),
        (x_2, weight_2, d_y_2, d_x_2, d_taps_2),
    )
    history = pick(i_s, history_0, history_1, history_2)
    d_final = pick(i_s, d_final_0, d_final_1, d_final_2)
    D, s_b, s_t, s_dy_b, s_dy_t, s_dx_b, s_dx_t = pick_all(
        i_s,
        (D_0, s_b_0, s_t_0, s_dy_b_0, s_dy_t_0, s_dx_b_0, s_dx_t_0),
        (D_1, s_b_1, s_t_1, s_dy_b_1, s_dy_t_1, s_dx_b_1, s_dx_t_1),
        (D_2, s_b_2, s_t_2, s_dy_b_2, s_dy_t_2, s_dx_b_2, s_dx_t_2),
    )
    o_d = i_d * C + tl.arange(0, C)
    m_d = (o_d < D)[None, :]
    begin = (i_t * BG + tl.arange(0, BG)) * RUN
    end = tl.minimum(begin + RUN, T)
    p_x = x + i_b.to(tl.int64) * s_b + o_d[None, :]
    p_dy = d_y + i_b.to(tl.int64) * s_dy_b + o_d[None, :]
    p_dx = d_x + i_b.to(tl.int64) * s_dx_b + o_d[None, :]
    taps = load_taps(weight, o_d, D, W)
    row = Row(i_b, T, N, cu_seqlens, sequence, counts, history, d_final, o_d, D, m_d)
    n, position, _ = place(begin, row, PACKED, PADDED)
    window = load_window(p_x, history, s_t, begin, n, position, o_d, T, D, m_d, W)
    p_x, p_dy = rows_at(p_x, begin, s_t), rows_at(p_dy, begin, s_dy_t)
    p_dx = rows_at(p_dx, begin - (W - 1), s_dx_t)
    grads, pending = zeros(W, BG, C), zeros(W - 1, BG, C)
    next_x = load_tokens(p_x, s_t, begin, T, m_d, AT_ONCE)
    next_dy = load_tokens(p_dy, s_dy_t, begin, T, m_d, AT_ONCE)
    t = begin
    for _ in range(0, RUN, AT_ONCE):
        b_x, b_dy = next_x, next_dy
        p_x, p_dy = p_x + AT_ONCE * s_t, p_dy + AT_ONCE * s_dy_t
        # Before the stores, which no later load may pass; packed, there are no registers for them.
        if not PACKED:
            next_x = load_tokens(p_x, s_t, t + AT_ONCE, T, m_d, AT_ONCE)
            next_dy = load_tokens(p_dy, s_dy_t, t + AT_ONCE, T, m_d, AT_ONCE)
        for j in tl.static_range(AT_ONCE):
            b_dz, seen, given = step_back(
                b_x[j], b_dy[j], window, pending, taps, t, row, W, PACKED, PADDED, ACTIVATED, FINAL
            )
            grads = add_taps(grads, b_dz, seen, W)
            m = (t - (W - 1) >= begin) & (t - (W - 1) < end)
            tl.store(p_dx, given[0].to(d_x.dtype.element_ty), mask=m[:, None] & m_d)
            window, pending = later(seen, W), later(given, W)
            p_dx += s_dx_t
            t += 1
        if PACKED:
            next_x = load_tokens(p_x, s_t, t, T, m_d, AT_ONCE)
            next_dy = load_tokens(p_dy, s_dy_t, t, T, m_d, AT_ONCE)
    # The tokens past the run that saw its last ones are of the next one's sum.
    for j in tl.static_range(W - 1):
        _, seen, given = step_back(
            next_x[j], next_dy[j], window, pending, taps, t, row, W, PACKED, PADDED, ACTIVATED,
            FINAL,
        )  # fmt: skip
        m = (t - (W - 1) < end)[:, None] & m_d
        tl.store(p_dx, given[0].to(d_x.dtype.element_ty), mask=m)
        window, pending = later(seen, W), later(given, W)
        p_dx += s_dx_t
        t += 1
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


@triton.jit(do_not_specialize=["rows"])
def beside_kernel(
    given, out, rows, s_given, s_out, C: tl.constexpr, WHOLE: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """The C columns given, if any, and zeros after them up to WHOLE."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_r = (r < rows)[:, None]
    b = tl.zeros([BR, BC], out.dtype.element_ty)
    if given is not None:
        p = given + r[:, None] * s_given + o_c[None, :]
        b = tl.load(p, mask=m_r & (o_c < C)[None, :], other=0.0)
    tl.store(out + r[:, None] * s_out + o_c[None, :], b, mask=m_r & (o_c < WHOLE)[None, :])
