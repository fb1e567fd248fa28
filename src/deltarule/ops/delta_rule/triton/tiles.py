"""Tiles of what the kernels from chunk to chunk read and write: device functions."""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.runtime.rows import row_names

# Rows of the scalings [M, HV, SCALINGS, BT] of a chunk; the last two are the sums of its decays.
SCALING, SCALINGS = row_names("READ ERASE WRITE BETA WHOLE REST"), tl.constexpr(6)
# Of the parts [SLICES, M, HV, 4, BT] of dlog_decay: of queries, of keys, of what they write, and in
# the last what adds up to <D, S>. A slice beyond holds the sums across, in its first row.
SUM = row_names("QUERIES KEYS WRITES HELD")

# What a kernel is compiled for, handed on as one constant; None what a launch does not know.
Sizes = namedtuple(
    "Sizes",
    # Heads, those that share a gate, channels, writes of a token, tokens and rows of a chunk, and
    # tiles of them.
    "H HV PER_GATE K V N_STEPS CT BT BQ BK BC BV BN "
    # Kinds of calls.
    "ERASE TIED DECAY HAS_DECAY DECAYED SCALED UNIT_NORM PACKED "
    # How products are taken, and what decays are held to.
    "PRECISION MERGE EXACT BAR SHIFT "
    # What a launch goes through, does besides, and moves by the copy engine.
    "SPLIT OPEN WINDOW ERASING_ROWS OUTPUT SAVE STAGES TMA TMA_STORE "
    # What one kernel alone is told: heads of a sum; parts of a decay's gradient; ends of segments;
    # rows of a thread, and how far decays may go.
    "BH BD SLICES PAIRS ROWS DIAGONAL REVERSED DEEP RANGE",
)


@triton.jit
def state_tile(x, i_n, i_h, o_v, o_k, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    return x + ((i_n.to(tl.int64) * HV + i_h) * V + o_v[:, None]) * K + o_k[None, :]


@triton.jit
def load_state(x, i_slot, i_v, i_k, S: tl.constexpr):
    """Rows from i_v and channels from i_k on of a chunk's state; zeros outside.

    x is [slots, V, K], or with TMA a descriptor of [slots * V, K], and then the tile is full.
    """
    if S.TMA:
        b_x = x.load([(i_slot * S.V).to(tl.int32) + i_v, i_k])
    else:
        o_v, o_k = i_v + tl.arange(0, S.BV), i_k + tl.arange(0, S.BC)
        p_x = state_tile(x, i_slot, 0, o_v, o_k, 1, S.K, S.V)
        if S.K % S.BC == 0 and S.V % S.BV == 0:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_v < S.V)[:, None] & (o_k < S.K)[None, :], other=0.0)
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
    x, row, i_h, column, o_r, m_r, o_c, HEADS: tl.constexpr, C: tl.constexpr, S: tl.constexpr
):
    """Rows o_r from `row` on and columns o_c (from `column` on) of head i_h; zeros outside.

    x is [rows, HEADS, C], or with TMA a descriptor of [rows, HEADS * C], and then the tile is full.
    """
    if S.TMA:
        b_x = x.load([row.to(tl.int32), i_h * C + column])
    else:
        # A tile has a power of two of columns.
        WHOLE_ROWS: tl.constexpr = (o_c.shape[0] - 1) & C == 0
        b_x = load_rows(x + (row * HEADS + i_h) * C, o_r, m_r, o_c, C, HEADS * C, WHOLE_ROWS)
    return b_x


@triton.jit
def load_rows(x, o_r, m_r, o_c, C: tl.constexpr, stride, WHOLE: tl.constexpr):
    p_x = x + o_r[:, None] * stride + o_c[None, :]
    if WHOLE:
        b_x = tl.load(p_x, mask=m_r[:, None], other=0.0)
    else:
        b_x = tl.load(p_x, mask=m_r[:, None] & (o_c < C)[None, :], other=0.0)
    return b_x


@triton.jit
def store_rows(x, b_x, o_r, m_r, o_c, C: tl.constexpr, stride):
    """Write rows o_r and columns o_c of a tensor that has C columns."""
    p_x = x + o_r[:, None] * stride + o_c[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_r[:, None] & (o_c < C)[None, :])


@triton.jit
def load_slot(x, i_slot, o_r, o_c, ROWS: tl.constexpr, C: tl.constexpr, S: tl.constexpr):
    """A chunk's tile of a tensor [M, HV, ROWS, C], whose empty rows hold zeros.

    With TMA x is a descriptor of [M * HV * ROWS, C].
    """
    if S.TMA:
        b_x = x.load([(i_slot * ROWS).to(tl.int32), 0])
    else:
        p_x = x + i_slot * ROWS * C + o_r[:, None] * C + o_c[None, :]
        if o_c.shape[0] == C:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_c < C)[None, :], other=0.0)
    return b_x


@triton.jit
def load_keys(x, decayed, row, i_slot, i_key, o_r, m_r, o_k, ROWS: tl.constexpr, S: tl.constexpr):
    """A chunk's rows of q or k, or of what they are once decayed."""
    if S.DECAYED:
        b_x = load_slot(decayed, i_slot, o_r, o_k, ROWS, S.K, S)
    else:
        b_x = load_tile(x, row, i_key, 0, o_r, m_r, o_k, S.H, S.K, S)
    return b_x


@triton.jit
def load_scaling(scalings, i_slot, which: tl.constexpr, o_r, S: tl.constexpr):
    if S.TMA:
        b_x = scalings.load([(i_slot * SCALINGS + which).to(tl.int32), 0])
    else:
        b_x = tl.load(scalings + (i_slot * SCALINGS + which) * S.BT + o_r)[None, :]
    return b_x


@triton.jit
def load_decay_sums(p_s, o_r, BT: tl.constexpr):
    """(whole, rest) up to rows o_r of the chunk whose scalings lie at p_s."""
    return tl.load(p_s + SCALING.WHOLE * BT + o_r), tl.load(p_s + SCALING.REST * BT + o_r)


@triton.jit
def load_chunk_sums(p_s, o_r, o_i, N_STEPS: tl.constexpr, BT: tl.constexpr):
    """(whole, rest) up to rows o_r, and up to tokens o_i, or to the chunk's end if that is less."""
    whole, rest = load_decay_sums(p_s, o_r, BT)
    whole_q, rest_q = whole, rest
    if N_STEPS > 1:
        whole_q, rest_q = load_decay_sums(p_s, tl.minimum(o_i * N_STEPS, BT - 1), BT)
    return whole, rest, whole_q, rest_q


@triton.jit
def load_decay(chunk_decay, i_slot, o_k, S: tl.constexpr):
    """The decay of a whole chunk, to be multiplied by rows of the state."""
    if S.DECAY == "head":
        b_decay = tl.load(chunk_decay + i_slot)
    else:
        b_decay = tl.load(chunk_decay + i_slot * S.K + o_k, mask=o_k < S.K, other=0.0)[None, :]
    return b_decay


@triton.jit
def boundary_state(x, i_s, i_n, i_h, o_v, o_k, at_boundary, S: tl.constexpr):
    """First state of a program: of its segment, else of its sequence, else zeros."""
    b_s = tl.zeros([S.BV, S.BK], tl.float32)
    if x is not None:
        i_x = i_s if S.SPLIT == "starts" else i_n
        rows = tl.where(at_boundary, S.V, 0) if S.SPLIT == "ends" else S.V
        mask = (o_v < rows)[:, None] & (o_k < S.K)[None, :]
        b_s = tl.load(state_tile(x, i_x, i_h, o_v, o_k, S.HV, S.K, S.V), mask=mask, other=0.0)
    return b_s


@triton.jit
def row_scaling(x, i_slot, which: tl.constexpr, b_none, o_r, HAS: tl.constexpr, S: tl.constexpr):
    """One scaling of a chunk's rows, or b_none where there is none."""
    return tl.load(x + (i_slot * SCALINGS + which) * S.BT + o_r) if HAS else b_none


@triton.jit
def identity(SIZE: tl.constexpr):
    """The identity matrix of so many rows, as a mask."""
    return tl.arange(0, SIZE)[:, None] == tl.arange(0, SIZE)[None, :]


@triton.jit
def diagonal(b_x):
    return tl.sum(tl.where(identity(b_x.shape[0]), b_x, 0.0), axis=1)


@triton.jit
def operand_products(b_x, b_y, PRECISION: tl.constexpr):
    """x . y of every row, where x is an operand of products and y the result of one.

    A product with the identity takes x to the registers in which y lies. Read as they are, rows
    of x would lie in others, and of both all would go through memory before they meet.
    """
    if PRECISION != "tf32x3":
        b_x = tl.dot(identity(b_x.shape[0]).to(b_x.dtype), b_x)
    return tl.sum(b_x * b_y, axis=1)


# Queries and keys divided by their norm, x / |x|: the norm, and the gradient through it.
# Added to a sum of squares, as the definition does.
EPSILON = tl.constexpr(1e-6)


@triton.jit
def inverse_norm(b_x):
    """1 / |x| of every row, in float32."""
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1) + EPSILON)


@triton.jit
def unit_norm_backward(b_x, b_norm, b_y):
    """dx = y - (x . y) x / |x|^2, where y = dx already divided by |x|."""
    b_x = b_x.to(tl.float32)
    return b_y - b_x * (tl.sum(b_x * b_y, axis=1) * b_norm * b_norm)[:, None]


# Products of decays inside a chunk, as powers of two of sums that never grow: device functions.
#
# The sum of logs to base 2 up to row i is kept in two parts, the whole numbers and the rest:
#
#     decay(j, i] = 2^((whole_i - whole_j) + (rest_i - rest_j))
#
# Whole numbers add exactly, so that a strong decay, or a reset, costs the weaker ones after it no
# digits. A log decay below -16384 counts as that: 64 of them still add exactly, and its power is
# zero long before.

# A log decay below this leaves nothing of what was there.
RESET = tl.constexpr(-60.0)
LOWEST = tl.constexpr(-16384.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def decay_ratio(whole_i, rest_i, whole_j, rest_j):
    """The decay after row j up to row i, for j <= i; 1 at most for any j."""
    return tl.exp2(tl.minimum((whole_i - whole_j) + (rest_i - rest_j), 0.0))


@triton.jit
def pair_decays(whole_i, rest_i, whole_j, rest_j):
    """The same for each pair of a row i and a column j."""
    return decay_ratio(whole_i[:, None], rest_i[:, None], whole_j[None, :], rest_j[None, :])


# The inverse that corrects what a chunk's rows write: device functions.
#
# With M_ij = decay(j, i] k_i . k_j for j < i, the prediction errors e of a chunk whose rows read F
# from the state before it are
#
#     E = (I + M Diag(beta))^-1 F = F + N Diag(beta) F          N = -(I + M Diag(beta))^-1 M
#
# N is exact where beta is zero, serves the backward as it stands (X = Y + N^T Diag(beta) Y), and
# its diagonal, which would be all ones in the inverse, is never rounded.


@triton.jit
def correction(b_m, b_beta, BT: tl.constexpr, PRECISION: tl.constexpr):
    """N [BT, BT] of a strictly lower triangular matrix b_m that holds -M, in float32.

    From the inverses of blocks of s rows to those of 2 s, which is substitution in another order.
    With R_s the inverse of the blocks on the diagonal of A = I + M Diag(beta), and N_s = -R_s M,

        [[A1, 0], [A21, A2]]^-1 = [[R1, 0], [-R2 A21 R1, R2]]
        N_2s = N_s + (N_s Diag(beta))_21 N_s          N_1 = -M

    Blocks of 16 rows are found first, each in one warp, which waits for no other: N_16 on the
    diagonal, where N_16 Diag(beta) = R_16 - I. float16 serves where inputs have fewer digits.
    """
    # The blocks [BT / 16, 16, 16] on the diagonal, which hold -M, and then N of each.
    o_b = tl.arange(0, BT // 16)
    same = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    b_x = tl.reshape(b_m, [BT // 16, 16, BT // 16, 16])
    b_x = tl.sum(tl.where(same, b_x, 0.0), axis=2)
    difference = (tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :])[None]
    b_of_block = tl.reshape(b_beta, [BT // 16, 1, 16])
    for level in tl.static_range(4):
        b_factor = tl.where(difference >> level == 1, b_of_block, 0.0)
        b_x = times(b_x * b_factor, b_x, b_x, PRECISION)
    # Each block all along its rows.
    b_x = tl.broadcast_to(b_x[:, :, None, :], [BT // 16, 16, BT // 16, 16])
    b_x = tl.reshape(b_x, [BT, BT])
    difference = tl.arange(0, BT)[:, None] ^ tl.arange(0, BT)[None, :]
    # Zeros, in the registers in which b_m lies: so the blocks need no way through memory.
    b_zeros = tl.where(difference < BT, 0.0, b_m)
    b_n = tl.where(difference < 16, b_x, b_m)
    b_x = tl.where(difference < 16, b_x * b_beta[None, :], b_zeros)
    b_n = times(b_x, tl.where(difference < 16, 0.0, b_m), b_n, PRECISION)
    for level in tl.static_range(4, 7):
        if 1 << level < BT:
            b_factor = tl.where(difference >> level == 1, b_beta[None, :], 0.0)
            b_n = times(b_n * b_factor, b_n, b_n, PRECISION)
    return b_n


@triton.jit
def times(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """b_x b_y + b_sum, the factors in float16 unless full precision is asked for."""
    if PRECISION != "tf32x3":
        b_x, b_y = b_x.to(tl.float16), b_y.to(tl.float16)
    return tl.dot(b_x, b_y, acc=b_sum, input_precision=PRECISION)


# What the gradients of a chunk sum over its values; gradients.py has the equations, and says why a
# tile in this loop is an operand and nothing else.

# What they are made of: values, S, E, dO, D and X.
Around = namedtuple("Around", "v states errors d_o d_states d_errors")
# One chunk of one value head: first token, tokens, rows, and its numbers. `slot` counts all
# chunks, `own` those of S, E, D and X.
Chunk = namedtuple("Chunk", "first tokens rows head slot own")


@triton.jit
def load_errors(x, at, i_v, S: tl.constexpr):
    """E of the values from i_v on: kept by the forward, or v where nothing is erased."""
    if S.TIED:
        b_e = load_chunk(x.errors, at.own, i_v, S.V, S.BT, S.BV, S.TMA)
    else:
        row, o_r, o_v = at.first * S.N_STEPS, tl.arange(0, S.BT), i_v + tl.arange(0, S.BV)
        b_e = load_tile(x.v, row, at.head, i_v, o_r, o_r < at.rows, o_v, S.HV, S.V, S)
    return b_e


@triton.jit
def add_held(b_held, b_d, b_s, PRECISION: tl.constexpr):
    """With <D, S> of further rows: in 16 bits in the diagonal of D S^T, so that a loop with
    products has one product more and reads no tile; in float32, where that takes many, row by row.
    """
    if PRECISION == "tf32x3":
        b_held += tl.sum(b_d * b_s, axis=1)
    else:
        b_held = tl.dot(b_d, tl.trans(b_s), acc=b_held)
    return b_held


@triton.jit
def over_values(x, at, o_i, m_i, i_k, S: tl.constexpr, WRITTEN: tl.constexpr):
    """dO w^T, X w^T, dO S, X S; and if they are WRITTEN here w D and what `add_held` adds up."""
    b_gp, b_gm = tl.zeros([S.BQ, S.BT], tl.float32), tl.zeros([S.BT, S.BT], tl.float32)
    b_read, b_row = tl.zeros([S.BQ, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
    b_col = tl.zeros([S.BT, S.BC], tl.float32)
    b_held = tl.zeros([S.BV] if S.PRECISION == "tf32x3" else [S.BV, S.BV], tl.float32)
    for i_v in range(0, S.V, S.BV):
        o_v = i_v + tl.arange(0, S.BV)
        b_do = load_tile(x.d_o, at.first, at.head, i_v, o_i, m_i, o_v, S.HV, S.V, S)
        b_e = load_errors(x, at, i_v, S)
        b_s = load_state(x.states, at.own, i_v, i_k, S)
        if WRITTEN:
            b_d = load_state(x.d_states, at.own, i_v, i_k, S)
        b_gp = tl.dot(b_do, tl.trans(b_e), acc=b_gp, input_precision=S.PRECISION)
        b_read = tl.dot(b_do, b_s, acc=b_read, input_precision=S.PRECISION)
        if WRITTEN:
            b_col = tl.dot(b_e, b_d, acc=b_col, input_precision=S.PRECISION)
            if S.HAS_DECAY:
                b_held = add_held(b_held, b_d, b_s, S.PRECISION)
        if S.TIED:
            b_x = load_chunk(x.d_errors, at.own, i_v, S.V, S.BT, S.BV, S.TMA)
            b_gm = tl.dot(b_x, tl.trans(b_e), acc=b_gm, input_precision=S.PRECISION)
            b_row = tl.dot(b_x, b_s, acc=b_row, input_precision=S.PRECISION)
    return b_gp, b_gm, b_read, b_row, b_col, b_held
