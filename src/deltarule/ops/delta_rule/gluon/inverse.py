"""U = T - I of a chunk, T = (I + L)^-1, L = B M strictly lower, B = Diag(beta); by doublings.

With T_s that of the blocks of s rows on the diagonal, and U_s = - T_s L of all columns, in whose
own columns it is T_s - I:

    U_1 = - L            U_2s = U_s + (U_s)_21 U_s            U_64 = U

First up to 16 rows, of the blocks on the diagonal alone, a block a warp: U and its transpose are
both kept, so that all operands are in registers. Up to 8 rows two blocks are one product of 16
rows, and what lies between the two (- L, and its transpose, too) is another. What counts is how
many products wait for each other, each in turn behind those of other warps. Then rows of 16, and
two doublings more:

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
# Of two products of 32 rows, by a block's 16 columns.
BY_TWO = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8]))
HALF = gl.constexpr(8)
# Of a block's quarters, as they lie in both.
QUARTER = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 8, 8],
    )
)  # fmt: skip
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
def product_of_pairs(a, transposed, total):
    """The same of two blocks of 8 rows, one below the other, in one product of 16 rows."""
    first, second = unpaired(a.to(gl.float16))
    zero = gl.zeros([BLOCKS, HALF, HALF], gl.float16, QUARTER)
    a = gl.convert_layout(from_quarters(first, zero, zero, second), LEFT)
    b = gl.permute(gl.reshape(transposed.to(gl.float16), [BLOCKS, 2, HALF, HALF]), (0, 1, 3, 2))
    return mma_v2(a, gl.convert_layout(gl.reshape(b, [BLOCKS, BLOCK, HALF]), RIGHT), total)


@gluon.jit
def paired(first, second):
    """Blocks of 8 rows, one below the other."""
    x = gl.permute(gl.join(first, second), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(x, [BLOCKS, BLOCK, HALF]), BATCH)


@gluon.jit
def unpaired(x):
    a, b = gl.split(gl.permute(gl.reshape(x, [BLOCKS, 2, HALF, HALF]), (0, 2, 3, 1)))
    return gl.convert_layout(a, QUARTER), gl.convert_layout(b, QUARTER)


@gluon.jit
def quarters(x):
    """The blocks of 8 rows and 8 columns of one of 16, row by row."""
    a, b, c, d = four(gl.permute(gl.reshape(x, [BLOCKS, 2, HALF, 2, HALF]), (0, 2, 4, 1, 3)))
    a, b = gl.convert_layout(a, QUARTER), gl.convert_layout(b, QUARTER)
    return a, b, gl.convert_layout(c, QUARTER), gl.convert_layout(d, QUARTER)


@gluon.jit
def from_quarters(a, b, c, d):
    x = gl.permute(joined((a, b, c, d)), (0, 3, 1, 4, 2))
    return gl.reshape(x, [BLOCKS, BLOCK, BLOCK])


@gluon.jit
def rows_and_columns(SIZE: gl.constexpr):
    """Of the numbers of a block, [1, row, 1] and [1, 1, column]."""
    column = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))[None, None, :]
    row = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, BATCH)))[None, :, None]
    return row, column


@gluon.jit
def transposed_blocks(x):
    """I (x^T)^T, as the sum of two numbers of 16 bits, which has the digits of both."""
    row, column = rows_and_columns(BLOCK)
    zero = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, BATCH)
    one = gl.where(row == column, 1.0, zero)
    low = x - x.to(gl.float16).to(gl.float32)
    return product_of_blocks(one, low, product_of_blocks(one, x, zero))


@gluon.jit
def invert_transposed(u_t):
    """T - I of the blocks of 16 rows, of their - L transposed alone: one block a product."""
    row, column = rows_and_columns(BLOCK)
    u = transposed_blocks(u_t)
    for level in gl.static_range(4):
        second = (row // 2**level % 2 == 1) & ((row ^ column) // 2**level == 1)
        u_21 = gl.where(second, u, 0.0)
        u, u_t = product_of_blocks(u_21, u_t, u), product_of_blocks(u_t, u_21, u_t)
    return u


@gluon.jit
def invert_blocks(u, u_t):
    """T - I of the blocks of 16 rows, of their - L and of its transpose."""
    a, _, c, d = quarters(u)
    a_t, c_t, _, d_t = quarters(u_t)
    u, u_t, c = paired(a, d), paired(a_t, d_t), paired(c_t, c)
    row, column = rows_and_columns(HALF)
    for level in gl.static_range(3):
        # (U_s)_21: of two blocks that follow each other the second's rows, the first's columns.
        second = (row // 2**level % 2 == 1) & ((row % HALF ^ column) // 2**level == 1)
        u_21 = u.to(gl.float16) * gl.where(second, 1.0, 0.0).to(gl.float16)
        _, lower_21 = unpaired(u_21)
        c_t, _ = unpaired(c.to(gl.float16))
        # Of the rows below, their columns before them, transposed and as they are.
        c = product_of_pairs(paired(c_t, lower_21), paired(lower_21, c_t), c)
        u, u_t = product_of_pairs(u_21, u_t, u), product_of_pairs(u_t, u_21, u_t)
    a_t, d_t = unpaired(u_t)
    c_t, c_8 = unpaired(c)
    c = product_of_pairs(paired(c_t, c_8), paired(d_t, a_t), c)
    a, d = unpaired(u)
    c_t, c = unpaired(c)
    zero = gl.zeros([BLOCKS, HALF, HALF], gl.float32, QUARTER)
    return gl.convert_layout(from_quarters(a, zero, c, d), BATCH)


@gluon.jit
def invert(tiles, slot, gate_slot, own, minus_m, SAVE: gl.constexpr):
    """U, or with SAVE N [64, 64], of what leave_m left and returned."""
    row, column = rows_and_columns(BLOCK)
    t = gl.where(row == column, 1.0, own)
    factor = tiles.gates.index(gate_slot * GATES + GATE.FACTOR).reshape([BLOCKS, BLOCK])
    left = t * gl.expand_dims(factor.load(gl.SliceLayout(1, BATCH)), 1)
    left = gl.convert_layout(left.to(gl.float16), LEFT)
    beta = 1.0
    if SAVE:
        own = product_of_blocks(t, minus_m, gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, BATCH))
        beta = tiles.gates.index(gate_slot * GATES + GATE.BETA)
        beta = beta.load(gl.SliceLayout(1, BY_BLOCK))[:, None]
    rows = tiles.rows.reshape([BLOCKS, BLOCK, CHUNK])
    a, b = rows_of_16(left, rows, own, 0), rows_of_16(left, rows, own, 1)
    c, d = rows_of_16(left, rows, own, 2), rows_of_16(left, rows, own, 3)
    # U is not known yet, and its slot free again.
    at_u = tiles.u.index(slot)
    room = at_u._reinterpret(gl.float16, [CHUNK, CHUNK], at_u.layout)
    return double_twice((a, b, c, d), beta, room, tiles.rows)


@gluon.jit
def rows_of_16(left, rows, own, COLUMN: gl.constexpr):
    """16 columns of U_16 or N_16 [64, 16]: no row has a block before its own in the last ones."""
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, BATCH)))[:, None, None]
    u = own * gl.where(block == COLUMN, 1.0, 0.0)
    if COLUMN < BLOCKS - 1:
        u = mma_v2(left, rows.slice(COLUMN * BLOCK, BLOCK, dim=2).load(RIGHT), u)
    return gl.convert_layout(gl.reshape(u, [CHUNK, BLOCK]), BY_BLOCK)


@gluon.jit
def double_twice(columns, beta, of_16, of_32):
    """U or N of 64 rows, of its columns, 16 each: products of zeros are left out.

    In a tile for each level lies beta U, for the warps of other rows.
    """
    a, b, c, d = columns
    zero = gl.zeros([CHUNK, BLOCK], gl.float32, BY_BLOCK)
    of_16.store(beside(a * beta, b * beta, c * beta, zero).to(gl.float16))
    # Of two blocks the second's rows, each of them times the first of its own two.
    block = gl.arange(0, CHUNK, gl.SliceLayout(1, BY_BLOCK))[:, None] // BLOCK
    left = a * gl.where(block == 1, 1.0, 0.0) + c * gl.where(block == 3, 1.0, 0.0)
    left = gl.reshape(left.to(gl.float16), [2, 2 * BLOCK, BLOCK])
    left = gl.convert_layout(left, gl.DotOperandLayout(0, BY_TWO, 2))
    barrier()
    a = add_first(a, left, of_16, 0)
    b = add_first(b, left, of_16, 1)
    c = add_first(c, left, of_16, 2)
    half = gl.reshape(gl.permute(gl.join(a * beta, b * beta), (0, 2, 1)), [CHUNK, 2 * BLOCK])
    of_32.slice(0, 2 * BLOCK, dim=1).store(half.to(gl.float16))
    first, second = of_rows(a, block >= 2), of_rows(b, block >= 2)
    barrier()
    a = add_product(a, first, of_32, 0, 0)
    a = add_product(a, second, of_32, 1, 0)
    b = add_product(b, second, of_32, 1, 1)
    return gl.convert_layout(beside(a, b, c, d), product(CHUNK))


@gluon.jit
def beside(a, b, c, d):
    """[64, 64] of its columns, 16 each."""
    return gl.reshape(gl.permute(joined((a, b, c, d)), (0, 2, 3, 1)), [CHUNK, CHUNK])


@gluon.jit
def add_first(total, left, tile, COLUMN: gl.constexpr):
    """16 columns of the first doubling."""
    right = tile.reshape([2, 2 * BLOCK, CHUNK]).slice(0, BLOCK, dim=1)
    right = right.slice(COLUMN * BLOCK, BLOCK, dim=2).load(gl.DotOperandLayout(1, BY_TWO, 2))
    total = gl.convert_layout(gl.reshape(total, [2, 2 * BLOCK, BLOCK]), BY_TWO)
    total = gl.reshape(mma_v2(left, right, total), [CHUNK, BLOCK])
    return gl.convert_layout(total, BY_BLOCK)


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
