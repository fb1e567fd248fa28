"""A memory of one or two maps, and its way forward.

    x = k        g = d loss / d(A x)        y = q        z = read(W, y; x, g)
    and with two maps x = gelu(A_1 k), g_1 = (A^T g) * gelu'(A_1 k), y = gelu(read(W_1, q; k, g_1))
    read(W, y; x, g)_t = kept_t W y_t + momentum_t M y_t - sum_i R_ti (x_i . y_t + bias) g_i
    W <- a W + b M - sum_i w_i g_i x_i^T        M <- c W + d M - sum_i u_i g_i x_i^T
    A <- W at the end of a full mini-batch

One program has one row and head, and goes through its mini-batches. The last map is cut into blocks
of its C input channels. A block of x, y, g_1 and of both maps needs nothing of the other blocks but
the sums A x, z and (y x^T) over them: so one loop over blocks gives A x, a second one reads and
writes. Everything about the network is in how a block of x and y is made: with one map it is loaded
(C = K), with two it goes through the rows of the first map that belong to it.

The maps stay in memory, which is the cache: [2 or 3 parts, numbers], a part being the first map
[C, K], its bias [C], the last map [V, C] and its bias [V]. Of the parts W, M and A only what can
differ is moved: after a full mini-batch A is W (`settled`), and of `ttt` (two parts, where A is
always W) M is zero. A mini-batch then reads W twice and writes it once: with 64 channels and 256
inside, as in TTT-MLP, 3 x 132 KB, where its 16 tokens are 16 KB. Titans-MLP, with 128 inside, reads
and writes M too: 5 x 66 KB. At 8 rows of 2,048 tokens and 16 heads that is 6.5 GB (5.4 GB) out of
17 MB of state, beside 92 GFLOP (55 GFLOP), each of which is three in tf32.

The backward pass runs the forward once more and notes the maps before each mini-batch. One kernel
then has all that needs no gradient by a later memory, for all mini-batches at once; another the
rest, from the last to the first, with the gradients by W, M and A in memory as those are.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.memory.triton.memory import (
    Map,
    Maps,
    applied,
    load_column,
    load_norm,
    load_tile,
    loss_gradient,
    product,
    store_tile,
    written,
)

# sqrt(8 / pi) and the cube's part of GELU's form with tanh.
SCALE, CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)


# What a kernel is compiled for, as one constant.
Sizes = namedtuple("Sizes", "HV T K V C BT BK BV BC SIZE PARTS DEEP BIAS NORM PACKED")
# What a call is given, and the memories: as they are, and as noted before each mini-batch.
Given = namedtuple("Given", "q k rows scalars memory noted")
# A mini-batch: where its tokens and its memory lie, what is known of the parts, and channels.
Place = namedtuple("Place", "i i_n settled ends last o_s o_k o_v")
# Numbers of each token: what is kept, the momentum, and the weights of the writes to W and M.
Columns = namedtuple("Columns", "kept momentum w u")
# Where a tile lies in a part, and what of it exists.
Tile = namedtuple("Tile", "o mask")


@triton.jit
def gate(b_x):
    """s = sigmoid(p) with p = sqrt(8 / pi) (x + a x^3), which is (1 + tanh(p / 2)) / 2."""
    b_p = (b_x + b_x * b_x * b_x * CUBE) * SCALE
    # An exponential that cannot overflow.
    b_e = tl.exp(-tl.abs(b_p))
    return tl.where(b_p >= 0, 1.0, b_e) / (1 + b_e)


@triton.jit
def gelu(b_x):
    return b_x * gate(b_x)


@triton.jit
def gelu_slopes(b_x):
    """gelu' = s + x s' and gelu'' = 2 s' + x s'', with s' = s (1 - s) p'.

    s'' = (1 - 2 s) s' p' + s (1 - s) p''. Where s is 0 or 1, s' is 0 before p' can overflow.
    """
    b_s = gate(b_x)
    b_p = (1 + b_x * b_x * (3 * CUBE)) * SCALE
    b_product = b_s * (1 - b_s)
    b_first = b_product * b_p
    b_second = (1 - 2 * b_s) * b_first * b_p + b_product * b_x * (6 * SCALE * CUBE)
    return b_s + b_x * b_first, 2 * b_first + b_x * b_second


@triton.jit
def is_full(full, i_m, i_r, R):
    """Whether the mini-batch ends, and the anchor moves."""
    return tl.load(full + i_m * R + i_r).to(tl.int32) != 0


@triton.jit
def is_settled(full, owner, i_m, i_r, R, PACKED: tl.constexpr):
    """Whether a full mini-batch of the same sequence is right before this one, in this call."""
    before = tl.maximum(i_m - 1, 0)
    settled = (i_m > 0) & is_full(full, before, i_r, R)
    if PACKED:
        settled &= tl.load(owner + before * R + i_r) == tl.load(owner + i_m * R + i_r)
    return settled


@triton.jit
def place_of(full, owner, i_m, M, R, i_r, i_h, o_s, o_k, o_v, S: tl.constexpr):
    """Mini-batch i_m of row i_r and head i_h, and the memory of the sequence that it is of."""
    i, i_n = (i_m * R + i_r) * S.HV + i_h, i_r
    if S.PACKED:
        i_n = tl.load(owner + i_m * R + i_r)
    i_n = i_n * S.HV + i_h
    settled = is_settled(full, owner, i_m, i_r, R, S.PACKED)
    ends = is_full(full, i_m, i_r, R)
    # Whether no mini-batch of the same sequence follows in this call.
    after = tl.minimum(i_m + 1, M - 1)
    last = i_m == M - 1
    if S.PACKED:
        last |= tl.load(owner + after * R + i_r) != tl.load(owner + i_m * R + i_r)
    return Place(i, i_n, settled, ends, last, o_s, o_k, o_v)


@triton.jit
def load_columns(rows, i, o_s, T: tl.constexpr):
    b_kept, b_momentum = load_column(rows, i, 0, o_s, T), load_column(rows, i, 1, o_s, T)
    return Columns(
        b_kept, b_momentum, load_column(rows, i, 2, o_s, T), load_column(rows, i, 3, o_s, T)
    )


@triton.jit
def first_tile(o_c, o_k, S: tl.constexpr):
    """Rows o_c of the first map, and their bias."""
    mask = (o_c < S.C)[:, None] & (o_k < S.K)[None, :]
    m_bias = (o_c < S.C * S.BIAS)[None, :]
    return Tile(o_c[:, None] * S.K + o_k[None, :], mask), Tile(S.C * S.K + o_c[None, :], m_bias)


@triton.jit
def last_tile(o_v, o_c, S: tl.constexpr):
    mask = (o_v < S.V)[:, None] & (o_c < S.C)[None, :]
    return Tile(start_of_last(S) + o_v[:, None] * S.C + o_c[None, :], mask)


@triton.jit
def last_bias(o_v, S: tl.constexpr):
    o = start_of_last(S) + S.V * S.C + o_v
    return Tile(o[None, :], (o_v < S.V * S.BIAS)[None, :])


@triton.jit
def start_of_last(S: tl.constexpr):
    return S.DEEP * S.C * (S.K + S.BIAS)


@triton.jit
def load_parts(memory, i, tile, settled, S: tl.constexpr):
    """A tile of W, M and A; of the parts that are known nothing is read."""
    p_x = memory + i * (S.PARTS * S.SIZE) + tile.o
    b_W = tl.load(p_x, mask=tile.mask, other=0.0)
    if S.PARTS == 2:
        b_M = tl.load(p_x + S.SIZE, mask=tile.mask & (settled == 0), other=0.0)
        b_A = b_W
    else:
        b_M = tl.load(p_x + S.SIZE, mask=tile.mask, other=0.0)
        b_A = tl.load(p_x + 2 * S.SIZE, mask=tile.mask & (settled == 0), other=0.0)
        b_A = tl.where(settled, b_W, b_A)
    return Maps(b_W, b_M, b_A)


@triton.jit
def anchor_of(memory, i, settled, S: tl.constexpr):
    p_x = memory + i * (S.PARTS * S.SIZE)
    if S.PARTS == 3:
        p_x += tl.where(settled, 0, 2 * S.SIZE)
    return p_x


@triton.jit
def trained(x, at, S: tl.constexpr):
    """A x: the network on the keys, where the gradient is taken."""
    p_A = anchor_of(x.memory, at.i_n, at.settled, S)
    of_last = last_bias(at.o_v, S)
    b_at = tl.zeros([S.BT, S.BV], tl.float32)
    b_at += tl.load(p_A + of_last.o, mask=of_last.mask, other=0.0)
    for c in range(0, S.C, S.BC):
        o_c = c + tl.arange(0, S.BC)
        if S.DEEP:
            tile, bias = first_tile(o_c, at.o_k, S)
            b_map = tl.load(p_A + tile.o, mask=tile.mask, other=0.0)
            b_bias = tl.load(p_A + bias.o, mask=bias.mask, other=0.0)
            b_k = load_tile(x.k, at.i, at.o_s, at.o_k, S.T, S.K)
            b_x = gelu(applied(b_k, Map(b_map, b_bias)))
        else:
            b_x = load_tile(x.k, at.i, at.o_s, o_c, S.T, S.K)
        tile = last_tile(at.o_v, o_c, S)
        b_at += product(b_x, tl.trans(tl.load(p_A + tile.o, mask=tile.mask, other=0.0)))
    return b_at


@triton.jit
def read_tile(b_y, maps, columns, settled, PARTS: tl.constexpr):
    """kept W y + momentum M y, of a block of y."""
    b_z = columns.kept * product(b_y, tl.trans(maps.W))
    # In `ttt` M is zero after a full mini-batch.
    if (settled == 0) | (PARTS == 3):
        b_z += columns.momentum * product(b_y, tl.trans(maps.M))
    return b_z


@triton.jit
def first_map(x, b_t, b_N, columns, o_c, at, S: tl.constexpr):
    """A_1 k, g_1 and u, what is read, of channels o_c from t = A^T g; and the maps there."""
    tile, bias = first_tile(o_c, at.o_k, S)
    maps = load_parts(x.memory, at.i_n, tile, at.settled, S)
    biases = load_parts(x.memory, at.i_n, bias, at.settled, S)
    b_k = load_tile(x.k, at.i, at.o_s, at.o_k, S.T, S.K)
    b_at = applied(b_k, Map(maps.A, biases.A))
    b_slope, _ = gelu_slopes(b_at)
    b_g = b_t * b_slope
    b_q = load_tile(x.q, at.i, at.o_s, at.o_k, S.T, S.K)
    b_u = read_tile(b_q, maps, columns, at.settled, S.PARTS)
    b_u += columns.kept * biases.W + columns.momentum * biases.M - product(b_N, b_g)
    return b_at, b_g, b_u, maps, biases


@triton.jit
def store_parts(memory, i, tile, maps, keeps_M, keeps_A, S: tl.constexpr):
    p_x = memory + i * (S.PARTS * S.SIZE) + tile.o
    tl.store(p_x, maps.W, mask=tile.mask)
    tl.store(p_x + S.SIZE, maps.M, mask=tile.mask & keeps_M)
    if S.PARTS == 3:
        tl.store(p_x + 2 * S.SIZE, maps.A, mask=tile.mask & keeps_A)


@triton.jit
def move_on(x, tile, maps, b_of_W, b_of_M, at, S: tl.constexpr):
    """Note a tile of W, M and A, and store what it is after the mini-batch."""
    b_W, b_M, b_A = maps
    p_a = x.scalars + at.i * 4
    b_next = tl.load(p_a) * b_W + tl.load(p_a + 1) * b_M - b_of_W
    b_next_M = tl.load(p_a + 2) * b_W + tl.load(p_a + 3) * b_M - b_of_M
    b_next_A = tl.where(at.ends, b_next, b_A)
    begins, goes_on = at.settled == 0, at.ends == 0
    # All have read what is overwritten.
    tl.debug_barrier()
    if x.noted is not None:
        store_parts(x.noted, at.i, tile, maps, begins | (S.PARTS == 3), begins, S)
    keeps_M, keeps_A = at.last | goes_on | (S.PARTS == 3), at.last | (at.settled & goes_on)
    moved = Maps(b_next, b_next_M, b_next_A)
    store_parts(x.memory, at.i_n, tile, moved, keeps_M, keeps_A, S)


@triton.jit(do_not_specialize=["M", "R"])
def network_scan_kernel(
    q, k, v, rows, scalars, writes, full, owner, memory, weight, bias, z, noted, eps, M, R,
    S: tl.constexpr,
):  # fmt: skip
    """z, and `memory` in place; with `noted` also what it is before each mini-batch.

    rows [M, R, HV, 4, T] are kept, momentum, w and u; scalars [M, R, HV, 4] are a, b, c and d.
    """
    x = Given(q, k, rows, scalars, memory, noted)
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    norm = load_norm(weight, bias, i_h, o_v, eps, S)
    of_bias = last_bias(o_v, S)
    for i_m in range(M):
        at = place_of(full, owner, i_m, M, R, i_r, i_h, o_s, o_k, o_v, S)
        i, i_n, settled = at.i, at.i_n, at.settled
        # The network on the keys, and the gradient of the loss.
        b_at = trained(x, at, S)
        b_v = load_tile(v, i, o_s, o_v, S.T, S.V)
        # The form with a norm, in which K = V, reads the key beside the value.
        b_key = load_tile(k, i, o_s, o_v, S.T, S.K) if S.NORM else b_v
        b_g = loss_gradient(b_at, b_key, b_v, norm, S)
        # The network on the queries, and what the maps become.
        columns = load_columns(rows, i, o_s, S.T)
        biases = load_parts(memory, i_n, of_bias, settled, S)
        b_z = columns.kept * biases.W + columns.momentum * biases.M
        b_of_Wb = tl.sum(columns.w * b_g, axis=0)[None, :]
        b_of_Mb = tl.sum(columns.u * b_g, axis=0)[None, :]
        move_on(x, of_bias, biases, b_of_Wb, b_of_Mb, at, S)
        b_R = load_tile(writes, i, o_s, o_s, S.T, S.T)
        b_N = b_R
        if S.DEEP:
            b_k, b_q = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
            b_N = (product(b_q, tl.trans(b_k)) + S.BIAS) * b_R
        b_pair = tl.zeros([S.BT, S.BT], tl.float32) + S.BIAS
        # A tile that is read again in each block fills no registers between products.
        store_tile(z, b_g, i, o_s, o_v, S.T, S.V)
        tl.debug_barrier()
        for c in range(0, S.C, S.BC):
            o_c = c + tl.arange(0, S.BC)
            b_g = load_tile(z, i, o_s, o_v, S.T, S.V)
            tile = last_tile(o_v, o_c, S)
            maps = load_parts(memory, i_n, tile, settled, S)
            if S.DEEP:
                b_t = product(b_g, maps.A)
                b_x, b_y = through_first_map(x, b_N, b_t, columns, o_c, at, S)
            else:
                b_x, b_y = load_tile(k, i, o_s, o_c, S.T, S.K), load_tile(q, i, o_s, o_c, S.T, S.K)
            b_pair += product(b_y, tl.trans(b_x))
            b_z += read_tile(b_y, maps, columns, settled, S.PARTS)
            b_of_W, _ = written(columns.w * b_g, b_x, S.BIAS)
            b_of_M, _ = written(columns.u * b_g, b_x, S.BIAS)
            move_on(x, tile, maps, b_of_W, b_of_M, at, S)
        b_z -= product(b_pair * b_R, load_tile(z, i, o_s, o_v, S.T, S.V))
        tl.debug_barrier()
        store_tile(z, b_z, i, o_s, o_v, S.T, S.V)
        # Other threads read what is stored.
        tl.debug_barrier()


@triton.jit
def through_first_map(x, b_N, b_t, columns, o_c, at, S: tl.constexpr):
    """x and y of channels o_c, from t = A^T g there; the rows of the first map move on."""
    tile, bias = first_tile(o_c, at.o_k, S)
    b_at, b_g, b_u1, maps, biases = first_map(x, b_t, b_N, columns, o_c, at, S)
    b_k = load_tile(x.k, at.i, at.o_s, at.o_k, S.T, S.K)
    b_of_W, b_of_Wb = written(columns.w * b_g, b_k, S.BIAS)
    b_of_M, b_of_Mb = written(columns.u * b_g, b_k, S.BIAS)
    move_on(x, tile, maps, b_of_W, b_of_M, at, S)
    move_on(x, bias, biases, b_of_Wb, b_of_Mb, at, S)
    return gelu(b_at), gelu(b_u1)


# The forward of a map that fits the registers: W, M and A stay there from the first mini-batch to
# the last. Every product is of few rows, and nothing is pipelined: each has ended before the next
# instruction reads what it gave. Backwards, beside the operands of nine products, the registers
# have no room for the gradients by W, M and A.


@triton.jit
def load_both(memory, i, tile, of_bias, S: tl.constexpr):
    """W, M and A, and the biases of each, zeros if there is none."""
    b_none = tl.zeros([1, S.BV], tl.float32)
    biases = Maps(b_none, b_none, b_none)
    if S.BIAS:
        biases = load_parts(memory, i, of_bias, False, S)
    return load_parts(memory, i, tile, False, S), biases


@triton.jit
def store_both(memory, i, tile, of_bias, maps, biases, S: tl.constexpr):
    store_parts(memory, i, tile, maps, True, True, S)
    if S.BIAS:
        store_parts(memory, i, of_bias, biases, True, True, S)


@triton.jit
def moved(b_a, b_b, b_c, b_d, ends, maps, b_of_W, b_of_M):
    """W, M and A after a mini-batch that writes so much to W and M."""
    b_W = b_a * maps.W + b_b * maps.M - b_of_W
    return Maps(b_W, b_c * maps.W + b_d * maps.M - b_of_M, tl.where(ends, b_W, maps.A))


@triton.jit(do_not_specialize=["M", "R"])
def held_scan_kernel(
    q, k, v, rows, scalars, writes, full, owner, memory, weight, bias, z, eps, M, R,
    S: tl.constexpr,
):  # fmt: skip
    """As `network_scan_kernel`, which alone notes the maps for a backward."""
    i_r, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_k, o_v = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    norm = load_norm(weight, bias, i_h, o_v, eps, S)
    tile, of_bias = last_tile(o_v, o_k, S), last_bias(o_v, S)
    i_n = i_r
    if S.PACKED:
        i_n = tl.load(owner + i_r)
    maps, biases = load_both(memory, i_n * S.HV + i_h, tile, of_bias, S)
    for i_m in range(M):
        i = (i_m * R + i_r) * S.HV + i_h
        if S.PACKED:
            i_next = tl.load(owner + i_m * R + i_r)
            if i_next != i_n:
                store_both(memory, i_n * S.HV + i_h, tile, of_bias, maps, biases, S)
                maps, biases = load_both(memory, i_next * S.HV + i_h, tile, of_bias, S)
                i_n = i_next
        b_x, b_y = load_tile(k, i, o_s, o_k, S.T, S.K), load_tile(q, i, o_s, o_k, S.T, S.K)
        b_v = load_tile(v, i, o_s, o_v, S.T, S.V)
        b_at = applied(b_x, Map(maps.A, biases.A))
        # The form with a norm, in which K = V, reads the key beside the value.
        b_key = b_x if S.NORM else b_v
        b_g = loss_gradient(b_at, b_key, b_v, norm, S)
        b_pair = product(b_y, tl.trans(b_x)) + S.BIAS
        b_z = load_column(rows, i, 0, o_s, S.T) * applied(b_y, Map(maps.W, biases.W))
        b_z += load_column(rows, i, 1, o_s, S.T) * applied(b_y, Map(maps.M, biases.M))
        b_z -= product(b_pair * load_tile(writes, i, o_s, o_s, S.T, S.T), b_g)
        store_tile(z, b_z, i, o_s, o_v, S.T, S.V)
        of_W = written(b_g * load_column(rows, i, 2, o_s, S.T), b_x, S.BIAS)
        of_M = written(b_g * load_column(rows, i, 3, o_s, S.T), b_x, S.BIAS)
        b_a, b_b = tl.load(scalars + i * 4), tl.load(scalars + i * 4 + 1)
        b_c, b_d = tl.load(scalars + i * 4 + 2), tl.load(scalars + i * 4 + 3)
        ends = is_full(full, i_m, i_r, R)
        maps = moved(b_a, b_b, b_c, b_d, ends, maps, of_W.weights, of_M.weights)
        biases = moved(b_a, b_b, b_c, b_d, ends, biases, of_W.bias, of_M.bias)
    store_both(memory, i_n * S.HV + i_h, tile, of_bias, maps, biases, S)
