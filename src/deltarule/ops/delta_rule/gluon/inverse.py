"""U = T - I of a chunk, T = (I + L)^-1, L = B M strictly lower, B = Diag(beta); by doublings.

With T_s that of the blocks of s rows on the diagonal, and U_s = - T_s L of all columns, in whose
own columns it is T_s - I:

    U_1 = - L            U_2s = U_s + (U_s)_21 U_s            U_64 = U

First up to 16 rows, of the blocks on the diagonal alone, a block a warp: U and its transpose are
both kept, so that all operands are in registers. Then rows of 16, and two doublings more:

    U_16 = - T_16 L

Operands are rounded to float16; instructions of a warp want no fence and are not waited for. Powers
of L would be fewer products, whose sum cancels where keys are alike, which float16 does not bear.

For a backward N is made, T = I + B N, which no beta of 0 hides: with L = M B, whose inverse is
I + N B,

    N_16 = - T_16 M                         N_2s = N_s + (N_s)_21 B N_s
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from deltarule.ops.delta_rule.gluon.memory import BLOCK, BLOCKS, CHUNK, GATE, GATES, product
from deltarule.ops.runtime.gluon_tiles import barrier

# Of products of batches, one 16 x 16 block (or 16 rows) a warp.
BATCH = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
# Of products of 64 rows, 16 a warp, by a block's 16 columns.
BY_BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
# Left and right operands of the former.
LEFT = gl.constexpr(gl.DotOperandLayout(0, BATCH, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, BATCH, 2))
PLAIN_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def four(x):
    """The four numbers of the last two axes of x [..., 2, 2]."""
    a, b = gl.split(x)
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return a0, b0, a1, b1


@gluon.jit
def joined(x):
    """Those axes again."""
    return gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))


@gluon.jit
def product_of_blocks(a, transposed, total):
    """total + a b of blocks [block, row, column], b by its transpose: no lane wants another's.

    The registers of a sum are those of a left operand, and its transpose's those of a right one.
    """
    a, b = a.to(gl.float16), gl.permute(transposed.to(gl.float16), (0, 2, 1))
    return mma_v2(gl.convert_layout(a, LEFT), gl.convert_layout(b, RIGHT), total)


@gluon.jit
def rows_and_columns():
    """Of the numbers of a block, [1, row, 1] and [1, 1, column]."""
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))[None, None, :]
    row = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, BATCH)))[None, :, None]
    return row, column


@gluon.jit
def invert_blocks(u_t):
    """T - I of the blocks of 16 rows, of their - L transposed [block, column, row]."""
    row, column = rows_and_columns()
    zero = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, BATCH)
    one = gl.where(row == column, 1.0, zero)
    # U = I (U^T)^T, as the sum of two numbers of 16 bits, which has the digits of both.
    low = u_t - u_t.to(gl.float16).to(gl.float32)
    u = product_of_blocks(one, low, product_of_blocks(one, u_t, zero))
    for level in gl.static_range(4):
        # (U_s)_21: of two blocks that follow each other the second's rows, the first's columns.
        second = (row // 2**level % 2 == 1) & ((row ^ column) // 2**level == 1)
        u_21 = gl.where(second, u, 0.0)
        u, u_t = product_of_blocks(u_21, u_t, u), product_of_blocks(u_t, u_21, u_t)
    return u


@gluon.jit
def invert(tiles, slot, gate_slot, minus_l, minus_m, SAVE: gl.constexpr):
    """U, or with SAVE N [64, 64], of what leave_m left and returned."""
    u = invert_blocks(minus_l)
    row, column = rows_and_columns()
    t = gl.where(row == column, 1.0, u)
    factor = tiles.gates.index(gate_slot * GATES + GATE.FACTOR).reshape([BLOCKS, BLOCK])
    left = t * gl.expand_dims(factor.load(gl.SliceLayout(1, BATCH)), 1)
    right = tiles.rows.reshape([BLOCKS, BLOCK, CHUNK]).load(RIGHT)
    zero = gl.zeros([BLOCKS, BLOCK, CHUNK], gl.float32, BATCH)
    rows = mma_v2(gl.convert_layout(left.to(gl.float16), LEFT), right, zero)
    own, beta = u, 1.0
    if SAVE:
        own = product_of_blocks(t, minus_m, gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, BATCH))
        beta = tiles.gates.index(gate_slot * GATES + GATE.BETA)
        beta = beta.load(gl.SliceLayout(1, product(CHUNK)))[:, None]
    u = with_blocks(rows, own)
    # U is not known yet, and its slot free again.
    at_u = tiles.u.index(slot)
    room = at_u._reinterpret(gl.float16, [CHUNK, CHUNK], at_u.layout)
    return double_twice(u, beta, room, tiles.rows, SAVE)


@gluon.jit
def double_twice(u, beta, of_16, of_32, SAVE: gl.constexpr):
    """U or N of 64 rows: a, b, c, d are its columns, 16 each, and products of zeros are left out.

    In a tile for each level lies beta U, for the warps of other rows.
    """
    block = gl.arange(0, CHUNK, gl.SliceLayout(1, BY_BLOCK))[:, None] // BLOCK
    of_16.store((u * beta).to(gl.float16))
    a, b, c, d = four(gl.permute(gl.reshape(u, [CHUNK, 2, 2, BLOCK]), (0, 3, 1, 2)))
    a, b = gl.convert_layout(a, BY_BLOCK), gl.convert_layout(b, BY_BLOCK)
    c, d = gl.convert_layout(c, BY_BLOCK), gl.convert_layout(d, BY_BLOCK)
    if SAVE:
        beta = gl.convert_layout(beta, BY_BLOCK)
    second, fourth = of_rows(a, block == 1), of_rows(c, block == 3)
    barrier()
    a = add_product(a, second, of_16, 0, 0)
    a = add_product(a, fourth, of_16, 2, 0)
    b = add_product(b, fourth, of_16, 2, 1)
    c = add_product(c, fourth, of_16, 2, 2)
    half = gl.reshape(gl.permute(gl.join(a * beta, b * beta), (0, 2, 1)), [CHUNK, 2 * BLOCK])
    of_32.slice(0, 2 * BLOCK, dim=1).store(half.to(gl.float16))
    first, second = of_rows(a, block >= 2), of_rows(b, block >= 2)
    barrier()
    a = add_product(a, first, of_32, 0, 0)
    a = add_product(a, second, of_32, 1, 0)
    b = add_product(b, second, of_32, 1, 1)
    u = gl.permute(joined((a, b, c, d)), (0, 2, 3, 1))
    return gl.convert_layout(gl.reshape(u, [CHUNK, CHUNK]), product(CHUNK))


@gluon.jit
def of_rows(x, there):
    """A left operand: x of some rows, and zero in the others."""
    x = (x * gl.where(there, 1.0, 0.0)).to(gl.float16)
    return gl.convert_layout(x, gl.DotOperandLayout(0, BY_BLOCK, 2))


@gluon.jit
def add_product(total, left, tile, ROW: gl.constexpr, COLUMN: gl.constexpr):
    """total + left times a block of the tile."""
    right = tile.slice(ROW * BLOCK, BLOCK).slice(COLUMN * BLOCK, BLOCK, dim=1)
    return mma_v2(left, right.load(gl.DotOperandLayout(1, BY_BLOCK, 2)), total)


@gluon.jit
def with_blocks(u, own):
    """u [block, row, 64 columns] with the blocks' own columns where they belong."""
    LAYOUT: gl.constexpr = product(CHUNK)
    u = gl.reshape(u, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    OF: gl.constexpr = u.type.layout
    own = gl.expand_dims(gl.convert_layout(own, gl.SliceLayout(2, OF)), 2)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, OF)))
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, OF)))
    row = gl.arange(0, BLOCKS, ROW)[:, None, None, None]
    column = gl.arange(0, BLOCKS, COLUMN)[None, None, :, None]
    # Added, because there u is zero: a factor for each of the four needs no predicates.
    u += own * gl.where(row == column, 1.0, 0.0)
    return gl.convert_layout(gl.reshape(u, [CHUNK, CHUNK]), LAYOUT)
