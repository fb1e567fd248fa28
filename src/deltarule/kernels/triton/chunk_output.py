"""What the tokens of a chunk read, from the state before it and from each other, and its gradients.

O = S q' + P w (+ P2 v)        computed transposed
Y = D y' + P^T dO              its gradient by w, with what the chunks that follow ask for
dv = D k' + P2^T dO + L^T X    with a free erase

Where scores are None, P_ij = read_i (q_i . k_j) write_j, without decays, is taken here: that costs
less than to fetch it.
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.tiles import READ, WRITE, load_scaling, load_square


@triton.jit
def chunk_output(
    b_s, b_w, b_v, b_q, b_y, scores, value_scores, readings, scale, i_slot, o_i, o_r,
    BQ: tl.constexpr, BT: tl.constexpr, ERASE: tl.constexpr, COPIES: tl.constexpr,
    SCALED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of O from S and w, both rounded, and the tiles of q and v: [BV, BQ].

    Where the scores are taken here, w is scaled by what scales its writing, and b_y holds k.
    """
    if scores is None:
        b_p = raw_scores(b_y, b_q, o_r[:, None] <= o_i[None, :], PRECISION)
    else:
        b_p = tl.trans(load_square(scores, i_slot, o_i, o_r, BQ, BT, TMA))
    b_o = tl.dot(b_s, tl.trans(b_q), input_precision=PRECISION)
    if scores is None:
        b_o = tl.dot(b_w, b_p, acc=b_o, input_precision=PRECISION)
    if SCALED:
        b_o *= load_scaling(readings, i_slot, READ, o_i, BT, TMA)
    elif not COPIES:
        b_o *= scale
    if scores is not None:
        b_o = tl.dot(b_w, b_p, acc=b_o, input_precision=PRECISION)
    if ERASE == "free":
        b_p = load_square(value_scores, i_slot, o_i, o_r, BQ, BT, TMA)
        b_o = tl.dot(tl.trans(b_v), tl.trans(b_p), acc=b_o, input_precision=PRECISION)
    return b_o


@triton.jit
def store_output(
    o, b_o, i_t, i_h, i_v, o_i, o_v, m_i, m_v,
    HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Write rows of O, held transposed, to o [tokens, HV, V]; TMA: by the copy engine."""
    if TMA:
        o.store([i_t.to(tl.int32), i_h * V + i_v * BV], tl.trans(b_o))
    else:
        p_o = o + (i_t * HV + i_h) * V + o_i[None, :] * (HV * V) + o_v[:, None]
        tl.store(p_o, b_o, mask=m_i[None, :] & m_v)


@triton.jit
def written_gradients(
    b_d, b_do, b_y, b_p, scores, readings, scalings, scale, i_slot, o_i, o_r,
    BT: tl.constexpr, COPIES: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dO as it meets q, scaled and rounded, [BV, BQ]; and Y [BV, BT], from D rounded."""
    b_z = tl.trans(b_do)
    if not COPIES:
        b_read = scale
        if SCALED:
            b_read = load_scaling(readings, i_slot, READ, o_i, BT, TMA)
        b_z = (b_z.to(tl.float32) * b_read).to(b_do.dtype)
    b_x = tl.dot(b_d, tl.trans(b_y), input_precision=PRECISION)
    if scores is None:
        b_x = tl.dot(b_z, b_p, acc=b_x, input_precision=PRECISION)
    if SCALED:
        b_x *= load_scaling(scalings, i_slot, WRITE, o_r, BT, TMA)
    if scores is not None:
        b_x = tl.dot(tl.trans(b_do), b_p, acc=b_x, input_precision=PRECISION)
    return b_z, b_x


@triton.jit
def value_gradients(
    b_d, b_do, b_x, b_k, value_scores, from_values, i_slot, o_i, o_r, BQ: tl.constexpr,
    BT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A free erase's dv [BV, BT], from D and X, both rounded, and rows b_k along which v goes."""
    b_dv = tl.dot(b_d, tl.trans(b_k), input_precision=PRECISION)
    b_p = load_square(value_scores, i_slot, o_i, o_r, BQ, BT, TMA)
    b_dv = tl.dot(tl.trans(b_do), b_p, acc=b_dv, input_precision=PRECISION)
    b_l = load_square(from_values, i_slot, o_r, o_r, BT, BT, TMA)
    return tl.dot(b_x, b_l, acc=b_dv, input_precision=PRECISION)


@triton.jit
def raw_scores(b_x, b_y, mask, PRECISION: tl.constexpr):
    """x_i . y_j where the mask is set, zeros elsewhere, rounded."""
    b_p = tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
    return tl.where(mask, b_p, 0.0).to(b_x.dtype)
