"""T = (I + L)^-1 of a chunk, L = B M strictly lower, B = Diag(beta); in three steps.

The blocks of 16 rows on the diagonal by substitution, a block a warp and a column a lane, float32:

    X = I;  X_r <- X_r - L_ri X_i           for the columns i in order, and all rows r after i

With U = T - I, and U_s = - T_s L of all columns with T_s of the blocks of s rows (in whose own
columns it is T_s - I), rows of 16 and then two doublings, in which the operands of the products are
rounded to float16, by instructions of a warp that want no fence and are not waited for:

    U_16 = - T_16 L                         U_2s = U_s + (U_s)_21 U_s

For a backward N is made, T = I + B N, which no beta of 0 hides: with L = M B, whose inverse is
I + N B,

    N_16 = - X_16 M                         N_2s = N_s + (N_s)_21 B N_s
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
# [block, column]: a block a warp, a column a lane (the upper lanes do what the lower ones do).
COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 0]], [[1, 0], [2, 0]], [], [4, 16]
    )
)
# [block, column, row] alike, the rows of a column in registers.
STACK = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 16, 16],
    )
)  # fmt: skip
# [block, row]: four rows of a block in every lane of its warp.
FOUR = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0]] * 5, [[1, 0], [2, 0]], [], [4, 4]
    )
)  # fmt: skip
PLAIN_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def new_identity():
    """I [16, 16] in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    identity = gl.allocate_shared_memory(gl.float32, [16, 16], PLAIN)
    row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    identity.store(gl.where(row == column, 1.0, 0.0))
    return identity


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
def in_lanes(a, b, c, d):
    """Four rows [block, column], each a register."""
    return (
        gl.convert_layout(a, COLUMNS), gl.convert_layout(b, COLUMNS),
        gl.convert_layout(c, COLUMNS), gl.convert_layout(d, COLUMNS),
    )  # fmt: skip


@gluon.jit
def eliminate(column, x_i, quad, ROW: gl.constexpr, QUAD: gl.constexpr):
    """The rows of a quad of X, less L_ri x_i for those after row i."""
    LANES: gl.constexpr = gl.SliceLayout(1, COLUMNS)
    x_a, x_b, x_c, x_d = quad
    if 4 * QUAD + 3 > ROW:
        # - L_ri of the rows r of the quad, the same in all lanes of a warp.
        l_a, l_b, l_c, l_d = four(
            gl.reshape(column.slice(4 * QUAD, 4, dim=1).load(FOUR), [4, 2, 2])
        )
        l_a = gl.expand_dims(gl.convert_layout(l_a, LANES), 1)
        l_b = gl.expand_dims(gl.convert_layout(l_b, LANES), 1)
        l_c = gl.expand_dims(gl.convert_layout(l_c, LANES), 1)
        l_d = gl.expand_dims(gl.convert_layout(l_d, LANES), 1)
        if 4 * QUAD > ROW:
            x_a += l_a * x_i
        if 4 * QUAD + 1 > ROW:
            x_b += l_b * x_i
        if 4 * QUAD + 2 > ROW:
            x_c += l_c * x_i
        x_d += l_d * x_i
    return x_a, x_b, x_c, x_d


@gluon.jit
def invert_blocks(minus_l, identity, factor, out, scaled):
    """X of the blocks of 16 rows to `out`, and with columns times `factor` to `scaled`.

    minus_l [i, block, r] holds - L_ri, and zero where r <= i; X is left as [block, column, row].
    """
    # From shared memory: as constants the identity would be kept in registers that are not there.
    rows = gl.expand_dims(identity.load(gl.SliceLayout(0, STACK)), 0)
    rows = gl.reshape(rows + gl.zeros([4, 16, 16], gl.float32, STACK), [4, 16, 2, 2, 2, 2])
    a, b, c, d = four(rows)
    a, b, c, d = four(a), four(b), four(c), four(d)
    x = (
        in_lanes(a[0], b[0], c[0], d[0]), in_lanes(a[1], b[1], c[1], d[1]),
        in_lanes(a[2], b[2], c[2], d[2]), in_lanes(a[3], b[3], c[3], d[3]),
    )  # fmt: skip
    for row in gl.static_range(15):
        column, x_i = minus_l.index(row), x[row // 4][row % 4]
        x = (
            eliminate(column, x_i, x[0], row, 0), eliminate(column, x_i, x[1], row, 1),
            eliminate(column, x_i, x[2], row, 2), eliminate(column, x_i, x[3], row, 3),
        )  # fmt: skip
    a, b, c, d = (
        joined((x[0][0], x[1][0], x[2][0], x[3][0])), joined((x[0][1], x[1][1], x[2][1], x[3][1])),
        joined((x[0][2], x[1][2], x[2][2], x[3][2])), joined((x[0][3], x[1][3], x[2][3], x[3][3])),
    )  # fmt: skip
    inverse = gl.convert_layout(gl.reshape(joined((a, b, c, d)), [4, 16, 16]), STACK)
    out.store(inverse.to(gl.float16))
    scaled.store(
        (inverse * gl.expand_dims(factor.load(gl.SliceLayout(2, STACK)), 2)).to(gl.float16)
    )


@gluon.jit
def invert(tiles, slot, gate_slot, SAVE: gl.constexpr):
    """U, or with SAVE N [64, 64], of what leave_m left."""
    at_t = tiles.t.index(slot)
    minus_l = at_t._reinterpret(gl.float32, [BLOCK, BLOCKS, BLOCK], PLAIN)
    factor = tiles.gates.index(gate_slot * GATES + GATE.FACTOR).reshape([BLOCKS, BLOCK])
    invert_blocks(minus_l, tiles.identity, factor, tiles.blocks, tiles.scaled)
    barrier()
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BATCH, 2)
    left = tiles.scaled.permute((0, 2, 1)).load(LEFT)
    right = tiles.rows.reshape([BLOCKS, BLOCK, CHUNK]).load(gl.DotOperandLayout(1, BATCH, 2))
    u = mma_v2(left, right, gl.zeros([BLOCKS, BLOCK, CHUNK], gl.float32, BATCH))
    left = tiles.blocks.permute((0, 2, 1)).load(LEFT)
    if SAVE:
        right = tiles.own.permute((0, 2, 1)).load(gl.DotOperandLayout(1, BATCH, 2))
        own = mma_v2(left, right, gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, BATCH))
        beta = tiles.gates.index(gate_slot * GATES + GATE.BETA)
        beta = beta.load(gl.SliceLayout(1, product(CHUNK)))[:, None]
    else:
        own = gl.convert_layout(left, BATCH).to(gl.float32)
        o_i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, BATCH)))[None, :, None]
        o_j = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))[None, None, :]
        own, beta = gl.where(o_i == o_j, 0.0, own), 1.0
    u = with_blocks(u, own)
    # T is not known yet, and its slot free again.
    room = at_t._reinterpret(gl.float16, [CHUNK, CHUNK], at_t.layout)
    return double_twice(u, beta, room, tiles.rows, SAVE)


@gluon.jit
def double_twice(u, beta, of_16, of_32, SAVE: gl.constexpr):
    """U or N of 64 rows: a, b, c, d are its columns, 16 each, and products of zeros are left out.

    In a tile for each level lies beta U, for the warps of other rows.
    """
    block = gl.arange(0, CHUNK, gl.SliceLayout(1, BY_BLOCK))[:, None] // BLOCK
    a, b, c, d = four(gl.permute(gl.reshape(u, [CHUNK, 2, 2, BLOCK]), (0, 3, 1, 2)))
    a, b = gl.convert_layout(a, BY_BLOCK), gl.convert_layout(b, BY_BLOCK)
    c, d = gl.convert_layout(c, BY_BLOCK), gl.convert_layout(d, BY_BLOCK)
    if SAVE:
        beta = gl.convert_layout(beta, BY_BLOCK)
    leave_column(of_16, 0, a * beta)
    leave_column(of_16, 1, b * beta)
    leave_column(of_16, 2, c * beta)
    second, fourth = of_rows(a, block == 1), of_rows(c, block == 3)
    barrier()
    a = add_product(a, second, of_16, 0, 0)
    a = add_product(a, fourth, of_16, 2, 0)
    b = add_product(b, fourth, of_16, 2, 1)
    c = add_product(c, fourth, of_16, 2, 2)
    leave_column(of_32, 0, a * beta)
    leave_column(of_32, 1, b * beta)
    first, second = of_rows(a, block >= 2), of_rows(b, block >= 2)
    barrier()
    a = add_product(a, first, of_32, 0, 0)
    a = add_product(a, second, of_32, 1, 0)
    b = add_product(b, second, of_32, 1, 1)
    u = gl.permute(joined((a, b, c, d)), (0, 2, 3, 1))
    return gl.convert_layout(gl.reshape(u, [CHUNK, CHUNK]), product(CHUNK))


@gluon.jit
def leave_column(tile, COLUMN: gl.constexpr, x):
    tile.slice(COLUMN * BLOCK, BLOCK, dim=1).store(x.to(gl.float16))


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
