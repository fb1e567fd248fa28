"""Products of a few rows on Hopper, which take as long as it takes to read the matrix.

    y = x W^T                           x [N, I], W [O, I]
    h = SiLU(x W_gate^T) * x W_up^T     W_gate and W_up end to end

The copy engine brings W and x through a ring of tiles. W fills the ring before a program waits for
the kernel ahead of it, and x, which comes later, holds up no round: a tile of W and one of x are
told to one barrier. Outputs are the long side of a product of tensor cores, rows the short one.

Few outputs are shared out over SPLIT programs by channels: the last of them to be done adds the
parts up in their order, so that a row has the same bits each time and in every company.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.fused.convolution_step_triton import (
    Within,
    convolve_within,
    seen_before,
    values_of,
)
from deltarule.ops.runtime.chained import chained, counters, let_next_start, wait_for_last
from deltarule.ops.runtime.gluon_tiles import (
    FusedLaunch,
    barrier,
    end_barriers,
    new_barrier,
    square,
)
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Outputs of a program, channels of a tile, and tiles of the ring.
OUTPUTS, CHANNELS, SLOTS = 64, 128, 4
# Programs that a GPU should have, and that share the channels of some outputs at most.
PROGRAMS, MOST_PARTS = 160, 8


@gluon.jit
def fetch_weight(weight, i_o, tile, full, to, BO: gl.constexpr, BI: gl.constexpr):
    """A tile of W: BO rows, or as many of gate and up together."""
    if len(weight.block_shape) == 2:
        at = [i_o * BO, tile * BI]
    else:
        at = [0, i_o * (BO // 2), tile * BI]
        to = to._reinterpret(to.dtype, weight.block_shape, weight.layout)
    tma.async_copy_global_to_shared(weight, at, full, to)


@gluon.jit
def few_rows_kernel(
    x, weight, y, parts, arrived, w_0, h_0, w_1, h_1, w_2, h_2, N, O,
    I: gl.constexpr, BO: gl.constexpr, BN: gl.constexpr, BI: gl.constexpr,
    SLOTS: gl.constexpr, SPLIT: gl.constexpr, GATED: gl.constexpr, D_0: gl.constexpr,
    D_1: gl.constexpr, D_2: gl.constexpr, W: gl.constexpr, ACTIVATED: gl.constexpr,
    EARLY: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """BO rows of W, or BO / 2 of each half, and one of SPLIT parts of its channels."""
    let_next_start(CHAINED)
    i_o, i_s = gl.program_id(0) // SPLIT, gl.program_id(0) % SPLIT
    TILES: gl.constexpr = (I + BI - 1) // BI
    OUT: gl.constexpr = BO // 2 if GATED else BO
    first = i_s * TILES // SPLIT
    count = (i_s + 1) * TILES // SPLIT - first
    w_tiles = gl.allocate_shared_memory(x.dtype, [SLOTS, BO, BI], square())
    x_tiles = gl.allocate_shared_memory(x.dtype, [SLOTS, BN, BI], square())
    full = new_barrier(SLOTS, 1)
    BYTES: gl.constexpr = (BO + BN) * BI * 2
    for i in range(min(count, SLOTS)):
        mbarrier.expect(full.index(i), BYTES)
        fetch_weight(weight, i_o, first + i, full.index(i), w_tiles.index(i), BO, BI)
    # Outputs lie side by side in y.
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [8, 1], [OUT // 8, 256 // OUT], [1, gl.num_warps()], [0, 1]
    )
    o_o = i_o * OUT + gl.arange(0, OUT, gl.SliceLayout(1, LAYOUT))[:, None]
    o_n = gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))[None, :]
    m = (o_n < N) & (o_o < O)
    if W > 0:
        wait_for_last(CHAINED and not EARLY)
        of = (w_0, w_1, w_2), (h_0, h_1, h_2), (D_0, D_1, D_2)
        before = seen_before(o_o, o_n, m, i_o * OUT, *of, W)
    wait_for_last(CHAINED)
    for i in range(min(count, SLOTS)):
        at = [0, (first + i) * BI]
        tma.async_copy_global_to_shared(x, at, full.index(i), x_tiles.index(i))
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    b_y = gl.zeros([BO, BN], gl.float32, SUM)
    for i in range(count):
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), i // SLOTS & 1)
        b_y = warpgroup_mma(
            w_tiles.index(slot), x_tiles.index(slot).permute((1, 0)), b_y, is_async=True
        )
        # The product before is done in all warps: its tiles may be overwritten.
        b_y = warpgroup_mma_wait(1, deps=(b_y,))
        barrier()
        later = i - 1 + SLOTS
        if (i > 0) & (later < count):
            slot = later % SLOTS
            mbarrier.expect(full.index(slot), BYTES)
            fetch_weight(weight, i_o, first + later, full.index(slot), w_tiles.index(slot), BO, BI)
            at = [0, (first + later) * BI]
            tma.async_copy_global_to_shared(x, at, full.index(slot), x_tiles.index(slot))
    b_y = warpgroup_mma_wait(0, deps=(b_y,))
    # What follows takes the memory of barriers, and of tiles that another warp may still multiply.
    end_barriers((full,))
    barrier()
    if SPLIT > 1:
        PARTS: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, gl.num_warps()], [0, 1])
        o_part = gl.arange(0, BN, gl.SliceLayout(0, PARTS))[None, :] * BO
        o_part += gl.arange(0, BO, gl.SliceLayout(1, PARTS))[:, None]
        p_part = parts + (i_o * SPLIT * BN * BO + o_part)
        gl.store(p_part + i_s * BN * BO, gl.convert_layout(b_y, PARTS))
        barrier()
        if gl.atomic_add(arrived + i_o, 1, sem="acq_rel") != SPLIT - 1:
            return
        gl.store(arrived + i_o, 0)
        b_sum = gl.zeros([BO, BN], gl.float32, PARTS)
        for part in gl.static_range(SPLIT):
            b_sum += gl.load(p_part + part * BN * BO, cache_modifier=".cg")
        b_y = gl.convert_layout(b_sum, SUM)
    if GATED:
        both = gl.allocate_shared_memory(
            gl.float32, [BO, BN], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        both.store(b_y.to(x.dtype).to(gl.float32))
        barrier()
        b_gate, b_up = both.slice(0, OUT).load(LAYOUT), both.slice(OUT, OUT).load(LAYOUT)
        b_out = b_gate * (1.0 / (1.0 + gl.exp(-b_gate))) * b_up
    else:
        b_out = gl.convert_layout(b_y, LAYOUT)
    if W > 0:
        b_out = convolve_within(b_out, before, m, W, ACTIVATED)
    p_y = y + (o_n.to(gl.int64) * O + o_o)
    gl.store(p_y, b_out.to(x.dtype), mask=m)


def few_rows(
    x: Tensor, weight: Tensor, gated: bool = False, within: Within | None = None
) -> Tensor:
    """y [N, O] of x [N, I] and weight [O, I], both contiguous; gated: h [N, O / 2]."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks = cdiv(weight.shape[0], OUTPUTS)
    # None of the programs that share channels is without a tile.
    split = max(1, min(MOST_PARTS, PROGRAMS // blocks, cdiv(inputs, CHANNELS)))
    width = max(16, power_of_2(rows))
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    parts = arrived = None
    if split > 1:
        parts = torch.empty(blocks * split * width * OUTPUTS, device=x.device)
        arrived = counters(x.device)
    values = {"x": x, "weight": weight, "y": y, "parts": parts, "arrived": arrived, "N": rows}
    values |= {"O": outputs, "I": inputs, "BO": OUTPUTS, "BN": width, "BI": CHANNELS}
    values |= {"SLOTS": SLOTS, "SPLIT": split, "GATED": gated, "num_warps": 4}
    values |= {**values_of(within), **chained()}
    tiles: dict[str, Any] = {"x": (inputs, [width, CHANNELS])}
    tiles["weight"] = inputs, [OUTPUTS, CHANNELS]
    if gated:
        tiles["weight"] = (outputs, inputs), [2, OUTPUTS // 2, CHANNELS]
    launch(few_rows_kernel, (blocks * split, 1, 1), values, tiles, FusedLaunch)
    return y
