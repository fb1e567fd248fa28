"""The running sums of the decays of every chunk's rows, which its pairs of rows are scaled by."""

import triton
import triton.language as tl

from deltarule.kernels.triton.chunk import chunk_place
from deltarule.kernels.triton.decay import decay_sums
from deltarule.kernels.triton.tiles import REST, SCALINGS, WHOLE


@triton.jit(do_not_specialize=["T", "N"])
def head_sums_kernel(
    log_decay, cu_seqlens, scalings, T, N, s_decay_b, s_decay_t, s_decay_h,
    HV: tl.constexpr, N_STEPS: tl.constexpr, CT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Two rows of scalings [M, HV, SCALINGS, BT], of one chunk and BH heads.

    Of the rows of a token the first decays.
    """
    i_m, o_h = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, CT, PACKED)
    if tokens <= 0:
        return
    o_r = tl.arange(0, BT)
    m_r = (o_r < tl.minimum(tokens, CT) * N_STEPS) & (o_r % N_STEPS == 0)
    m_h = (o_h < HV)[None, :]
    p_g = log_decay + (first // T) * s_decay_b + (first % T + o_r // N_STEPS)[:, None] * s_decay_t
    b_g = tl.load(p_g + o_h[None, :] * s_decay_h, mask=m_r[:, None] & m_h, other=0.0)
    whole, rest = decay_sums(b_g.to(tl.float32))
    p_s = scalings + (i_m.to(tl.int64) * HV + o_h)[None, :] * SCALINGS * BT + o_r[:, None]
    tl.store(p_s + WHOLE * BT, whole, mask=m_h)
    tl.store(p_s + REST * BT, rest, mask=m_h)


@triton.jit
def load_decay_sums(p_s, o_r, BT: tl.constexpr):
    """(whole, rest) up to rows o_r of the chunk whose scalings lie at p_s."""
    return tl.load(p_s + WHOLE * BT + o_r), tl.load(p_s + REST * BT + o_r)


@triton.jit
def load_chunk_sums(p_s, o_r, o_i, N_STEPS: tl.constexpr, BT: tl.constexpr):
    """(whole, rest) up to rows o_r, and up to tokens o_i, or to the chunk's end if that is less."""
    whole, rest = load_decay_sums(p_s, o_r, BT)
    whole_q, rest_q = whole, rest
    if N_STEPS > 1:
        whole_q, rest_q = load_decay_sums(p_s, tl.minimum(o_i * N_STEPS, BT - 1), BT)
    return whole, rest, whole_q, rest_q
