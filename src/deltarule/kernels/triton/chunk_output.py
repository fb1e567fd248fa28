"""What the tokens of a chunk read, from the state before it and from each other: a device function.

O = S q' + P w (+ P2 v)        computed transposed
"""

import triton
import triton.language as tl

from deltarule.kernels.triton.tiles import READ, load_scaling, load_square


@triton.jit
def chunk_output(
    b_s, b_w, b_v, b_q, scores, value_scores, readings, scale, i_slot, o_i, o_r,
    BQ: tl.constexpr, BT: tl.constexpr, ERASE: tl.constexpr, COPIES: tl.constexpr,
    SCALED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of O from S and w, both rounded, and the tiles of q and v: [BV, BQ]."""
    b_p = load_square(scores, i_slot, o_i, o_r, BQ, BT, TMA)
    b_o = tl.dot(b_s, tl.trans(b_q), input_precision=PRECISION)
    if SCALED:
        b_o *= load_scaling(readings, i_slot, READ, o_i, BT, TMA)
    elif not COPIES:
        b_o *= scale
    b_o = tl.dot(b_w, tl.trans(b_p), acc=b_o, input_precision=PRECISION)
    if ERASE == "free":
        b_p = load_square(value_scores, i_slot, o_i, o_r, BQ, BT, TMA)
        b_o = tl.dot(tl.trans(b_v), tl.trans(b_p), acc=b_o, input_precision=PRECISION)
    return b_o
