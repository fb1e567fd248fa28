"""The states at the starts of segments, as in triton/segments.py, for a forward that keeps nothing.

    S_start of the next = S_start A + (S_end from zero)

Nobody else wants A there: the ends leave it as two numbers of 16 bits, the sum of which it is, and
tensor cores read these halves where the copy engine put them. S is halved here, and the product of
both lower halves left out: what is lost of a number is 2^-17 of it, and rounded to the nearest.

A program keeps BV rows of one head's state, transposed, so that they are the short side of products
A^T S^T, and fetches A of the segments to come meanwhile.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.delta_rule.gluon.memory import product
from deltarule.ops.runtime.gluon_tiles import barrier, end_barrier, new_barrier, square


@triton.constexpr_function
def right(columns: int) -> Any:
    """Tiles of few columns that products take from the right."""
    return gl.NVMMASharedLayout(2 * columns, 16, rank=2)


@gluon.jit
def fetch(halves, row, n, count, tiles, full, K: gl.constexpr, SLOTS: gl.constexpr):
    """Both halves of A for product n, if there is one."""
    if n < count:
        slot = n % SLOTS
        mbarrier.expect(full.index(slot), 2 * K * K * 2)
        for half in gl.static_range(2):
            x = tiles.index(2 * slot + half)
            tma.async_copy_global_to_shared(halves, [row + half * K, 0], full.index(slot), x)


@gluon.jit(do_not_specialize=["segments"])
def halved_starts_kernel(
    halves, boundary, ends, starts, segments, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BV: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """starts [slots, HV, V, K] from boundary [N, HV, V, K] or None, and ends [slots, HV, V + K, K].

    halves is a descriptor of ends in 16 bits, [slots HV 2 (V + K), K]: behind V rows of S those of
    the upper halves of A, and of the lower.
    """
    SUMS: gl.constexpr = product(BV, 8)
    TILES: gl.constexpr = V // BV
    program = gl.program_id(0)
    head, sequence = program // TILES % HV, program // (TILES * HV)
    o_v = program % TILES * BV + gl.arange(0, BV, gl.SliceLayout(0, SUMS))[None, :]
    o_s = o_v * K + gl.arange(0, K, gl.SliceLayout(1, SUMS))[:, None]
    first, count = sequence * segments * HV + head, segments - 2
    # From a segment to the next.
    START: gl.constexpr = HV * V * K
    END: gl.constexpr = HV * (V + K) * K
    ROWS: gl.constexpr = 2 * HV * (V + K)
    starts += first.to(gl.int64) * (V * K)
    ends += first.to(gl.int64) * ((V + K) * K)
    row = first * (2 * (V + K)) + 2 * V + ROWS
    tiles = gl.allocate_shared_memory(halves.dtype, [2 * SLOTS, K, K], square())
    # By turns, so that one barrier a product is enough.
    s_halves = gl.allocate_shared_memory(halves.dtype, [4, K, BV], right(BV))
    full = new_barrier(SLOTS, 1)
    barrier()
    for n in gl.static_range(SLOTS - 1):
        fetch(halves, row + n * ROWS, n, count, tiles, full, K, SLOTS)
    s = gl.zeros([K, BV], gl.float32, SUMS)
    if boundary is not None:
        s = gl.load(boundary + (sequence * HV + head).to(gl.int64) * (V * K) + o_s)
    gl.store(starts + o_s, s)
    # The first one's end comes from the true state.
    s = gl.load(ends + o_s)
    gl.store(starts + START + o_s, s)
    for n in range(count):
        starts += START
        ends += END
        # Waited for behind the products.
        end = gl.load(ends + o_s)
        slot, turn = n % SLOTS, n % 2
        upper, lower = s_halves.index(2 * turn), s_halves.index(2 * turn + 1)
        s_upper = s.to(halves.dtype)
        upper.store(s_upper)
        lower.store((s - s_upper.to(gl.float32)).to(halves.dtype))
        fence_async_shared()
        barrier()
        # All have done with the product before.
        last = n + SLOTS - 1
        fetch(halves, row + last * ROWS, last, count, tiles, full, K, SLOTS)
        mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
        a_upper = tiles.index(2 * slot).permute((1, 0))
        a_lower = tiles.index(2 * slot + 1).permute((1, 0))
        s = gl.zeros([K, BV], gl.float32, SUMS)
        s = warpgroup_mma(a_lower, upper, s, use_acc=False, is_async=True)
        s = warpgroup_mma(a_upper, lower, s, is_async=True)
        s = warpgroup_mma(a_upper, upper, s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,)) + end
        gl.store(starts + START + o_s, s)
    end_barrier(full)
