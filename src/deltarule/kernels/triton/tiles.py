"""Tiles of what the kernels from chunk to chunk read and write: device functions."""

import triton
import triton.language as tl

# Rows of the scalings [M, HV, SCALINGS, BT] of a chunk; the last two are the sums of its decays.
READ, ERASE_ROW, WRITE, BETA = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
WHOLE, REST, SCALINGS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


@triton.jit
def state_tile(x, i_n, i_h, o_v, o_k, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Addresses of the rows o_v of one head's state in x [N, HV, V, K]."""
    return x + ((i_n.to(tl.int64) * HV + i_h) * V + o_v[:, None]) * K + o_k[None, :]


@triton.jit
def load_state(
    x, i_slot, i_v, i_k, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows from i_v and channels from i_k on of a chunk's state; zeros outside.

    x is [slots, V, K], or with TMA a descriptor of [slots * V, K], and then the tile is full.
    """
    if TMA:
        b_x = x.load([(i_slot * V).to(tl.int32) + i_v, i_k])
    else:
        o_v, o_k = i_v + tl.arange(0, BV), i_k + tl.arange(0, BC)
        p_x = state_tile(x, i_slot, 0, o_v, o_k, 1, K, V)
        if K % BC == 0 and V % BV == 0:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_v < V)[:, None] & (o_k < K)[None, :], other=0.0)
    return b_x


@triton.jit
def load_chunk(
    x, i_slot, i_v, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr
):
    """Columns from i_v on of a chunk's rows in x [slots, BT, V], or a descriptor of its rows."""
    if TMA:
        b_x = x.load([(i_slot * BT).to(tl.int32), i_v])
    else:
        o_r, o_v = tl.arange(0, BT), i_v + tl.arange(0, BV)
        b_x = load_rows(x + i_slot * BT * V, o_r, o_r < BT, o_v, V, V, V % BV == 0)
    return b_x


@triton.jit
def load_tile(
    x, row, i_h, column, o_r, m_r, o_c, HEADS: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows o_r from `row` on and columns o_c (from `column` on) of head i_h; zeros outside.

    x is [rows, HEADS, C], or with TMA a descriptor of [rows, HEADS * C], and then the tile is full.
    """
    if TMA:
        b_x = x.load([row.to(tl.int32), i_h * C + column])
    else:
        b_x = load_rows(x + (row * HEADS + i_h) * C, o_r, m_r, o_c, C, HEADS * C, WHOLE)
    return b_x


@triton.jit
def load_square(x, i_slot, o_i, o_r, ROWS: tl.constexpr, BT: tl.constexpr, TMA: tl.constexpr):
    """The tile [ROWS, BT] of a chunk; with TMA x is a descriptor of [M * HV * ROWS, BT]."""
    if TMA:
        b_x = x.load([(i_slot * ROWS).to(tl.int32), 0])
    else:
        b_x = tl.load(x + i_slot * ROWS * BT + o_i[:, None] * BT + o_r[None, :])
    return b_x


@triton.jit
def load_rows(x, o_r, m_r, o_c, C: tl.constexpr, stride, WHOLE: tl.constexpr):
    """Rows o_r and columns o_c of a tensor that has C columns; zeros outside."""
    p_x = x + o_r[:, None] * stride + o_c[None, :]
    if WHOLE:
        b_x = tl.load(p_x, mask=m_r[:, None], other=0.0)
    else:
        b_x = tl.load(p_x, mask=m_r[:, None] & (o_c < C)[None, :], other=0.0)
    return b_x


@triton.jit
def load_copy(
    x, i_slot, o_r, o_c, ROWS: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A chunk's tile of a tensor [M, HV, ROWS, C], whose empty rows hold zeros.

    With TMA x is a descriptor of [M * HV * ROWS, C].
    """
    if TMA:
        b_x = x.load([(i_slot * ROWS).to(tl.int32), 0])
    elif WHOLE:
        b_x = tl.load(x + i_slot * ROWS * C + o_r[:, None] * C + o_c[None, :])
    else:
        p_x = x + i_slot * ROWS * C + o_r[:, None] * C + o_c[None, :]
        b_x = tl.load(p_x, mask=(o_c < C)[None, :], other=0.0)
    return b_x


@triton.jit
def load_keys(
    x, copy, row, i_slot, i_key, o_r, m_r, o_k, ROWS: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, COPIES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A chunk's rows of q or k, or of their scaled copy."""
    WHOLE: tl.constexpr = o_k.shape[0] == K
    if COPIES:
        b_x = load_copy(copy, i_slot, o_r, o_k, ROWS, K, WHOLE, TMA)
    else:
        b_x = load_tile(x, row, i_key, 0, o_r, m_r, o_k, H, K, WHOLE, TMA)
    return b_x


@triton.jit
def load_scaling(scalings, i_slot, which: tl.constexpr, o_r, BT: tl.constexpr, TMA: tl.constexpr):
    """One scaling of a chunk's rows, as [1, rows]."""
    if TMA:
        b_x = scalings.load([(i_slot * SCALINGS + which).to(tl.int32), 0])
    else:
        b_x = tl.load(scalings + (i_slot * SCALINGS + which) * BT + o_r)[None, :]
    return b_x


@triton.jit
def load_decay(chunk_decay, i_slot, o_k, K: tl.constexpr, DECAY: tl.constexpr):
    """The decay of a whole chunk, to be multiplied by rows of the state."""
    if DECAY == "head":
        b_decay = tl.load(chunk_decay + i_slot)
    else:
        b_decay = tl.load(chunk_decay + i_slot * K + o_k, mask=o_k < K, other=0.0)[None, :]
    return b_decay


@triton.jit
def boundary_state(
    x, i_s, i_n, i_h, o_v, o_k, at_boundary, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Where a program starts: with a segment's state, or a sequence's; zeros elsewhere."""
    b_s = tl.zeros([o_v.shape[0], o_k.shape[0]], tl.float32)
    if x is not None:
        rows, i_x = V, i_n
        if SPLIT == "starts":
            i_x = i_s
        if SPLIT == "ends":
            rows = tl.where(at_boundary, V, 0)
        mask = (o_v < rows)[:, None] & (o_k < K)[None, :]
        b_s = tl.load(state_tile(x, i_x, i_h, o_v, o_k, HV, K, V), mask=mask, other=0.0)
    return b_s


@triton.jit
def store_ends(
    ends, i_s, i_h, i_v, i_a, o_k, b_s, b_through, K: tl.constexpr, V: tl.constexpr,
    HV: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr,
):  # fmt: skip
    """Rows of S, a tile of A (i_a >= 0), or its diagonal, of ends [slots, HV, V + K or 1, K]."""
    ROWS: tl.constexpr = V + 1 if ERASE == "none" else V + K
    o_end = tl.where(i_a < 0, i_v * BV, V + i_a * BV) + tl.arange(0, BV)
    m_end, m_k = o_end < tl.where(i_a < 0, V, ROWS), (o_k < K)[None, :]
    p_end = state_tile(ends, i_s, i_h, o_end, o_k, HV, K, ROWS)
    tl.store(p_end, b_s, mask=m_end[:, None] & m_k)
    if ERASE == "none":
        p_end = state_tile(ends, i_s, i_h, V + tl.arange(0, 1), o_k, HV, K, ROWS)
        tl.store(p_end, b_through, mask=(o_k < tl.where(i_v == 0, K, 0))[None, :])


@triton.jit
def store_final(
    final_state, i_s, i_n, i_h, o_v, o_k, last, b_s, K: tl.constexpr, V: tl.constexpr,
    HV: tl.constexpr, SLAB: tl.constexpr,
):  # fmt: skip
    """The state that a sequence ends with (last), or in any case that of a stretch's slab."""
    if SLAB != "none":
        i_n, last = i_s, True
    m_s = (o_v < tl.where(last, V, 0))[:, None] & (o_k < K)[None, :]
    tl.store(state_tile(final_state, i_n, i_h, o_v, o_k, HV, K, V), b_s, mask=m_s)


@triton.jit
def load_errors(
    v, errors, row, rows, i_h, i_slot, i_v, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, TIED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """E of the values from i_v on: kept by the forward, or v where nothing is erased."""
    if TIED:
        b_e = load_chunk(errors, i_slot, i_v, V, BT, BV, TMA)
    else:
        o_r, o_v = tl.arange(0, BT), i_v + tl.arange(0, BV)
        b_e = load_tile(v, row, i_h, i_v, o_r, o_r < rows, o_v, HV, V, V % BV == 0, TMA)
    return b_e


@triton.jit
def row_scaling(
    scalings, i_slot, which: tl.constexpr, b_none, o_r, BT: tl.constexpr, HAS: tl.constexpr
):
    """One scaling of a chunk's rows, or b_none where there is none."""
    b_scaling = b_none
    if HAS:
        b_scaling = tl.load(scalings + (i_slot * SCALINGS + which) * BT + o_r)
    return b_scaling
