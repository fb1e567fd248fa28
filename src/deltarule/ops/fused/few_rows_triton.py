"""Products of a few rows with a matrix, which take as long as it takes to read the matrix.

    y = x W^T                           x [N, I], W [O, I]
    h = SiLU(x W_gate^T) * x W_up^T     W_gate and W_up end to end

Outputs are the long side of a product of tensor cores, rows the short one. Before a program looks
at x, which in a chain of kernels is not there yet, its first tiles of W are on their way.
Few outputs are shared out over SPLIT programs by channels: the last of them to be done adds the
parts up in their order, so that a row has the same bits each time. They depend on how many rows
stand beside it only by NARROW, where SPLIT changes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.fused import convolution_step_triton as convolution
from deltarule.ops.fused.convolution_step_triton import Within
from deltarule.ops.fused_kernels import is_hopper
from deltarule.ops.runtime.chained import chained, counters, let_next_start, wait_for_last
from deltarule.ops.runtime.launch import ALIGNED
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv, power_of_2

# Outputs of a program, and channels of a tile.
OUTPUTS, CHANNELS = 64, 128
# More rows are faster by the ring of few_rows_gluon.py on Hopper.
NARROW = 16
# Here, and in the ring: tiles on their way and one more; its tiles.
STAGES, SLOTS = 5, 4
# Programs that a GPU should have, by whether they have a ring; those that share channels count in
# half as many places.
PROGRAMS = {False: 264, True: 128}
# Programs that share the channels of some outputs, at most.
MOST_PARTS = 8


@triton.jit
def tile_at(p, o_i, m, I: tl.constexpr, BI: tl.constexpr):
    """Channels of those of the rows at p that m says."""
    m_tile = m[:, None]
    if I % BI != 0:
        m_tile = (o_i < I)[None, :] & m_tile
    return tl.load(p[:, None] + o_i[None, :], mask=m_tile, other=0.0)


@triton.jit
def few_rows_kernel(
    x, weight, y, parts, arrived, w_0, h_0, w_1, h_1, w_2, h_2, N, O,
    I: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr,
    SPLIT: tl.constexpr, GATED: tl.constexpr, D_0: tl.constexpr,
    D_1: tl.constexpr, D_2: tl.constexpr, W: tl.constexpr, ACTIVATED: tl.constexpr,
    EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BO rows of W, or BO / 2 of each half, and one of SPLIT parts of its channels."""
    let_next_start(CHAINED)
    i_o, i_s = tl.program_id(0), tl.program_id(1)
    o_o, o_n = i_o * BO + tl.arange(0, BO), tl.arange(0, BN)
    if GATED:
        # A row of the one half beside that of the other.
        row, m_o = o_o // 2 + o_o % 2 * O, o_o // 2 < O
    else:
        row, m_o = o_o, o_o < O
    m_n = o_n < N
    TILES: tl.constexpr = (I + BI - 1) // BI
    first, last = i_s * TILES // SPLIT, (i_s + 1) * TILES // SPLIT
    # What lies past the last output is the last one again: it is not stored.
    p_w = weight + tl.where(m_o, row, 0).to(tl.int64) * I
    o_i = tl.arange(0, BI)
    if W > 0:
        wait_for_last(CHAINED and not EARLY)
        m = m_n[:, None] & m_o[None, :]
        of = (w_0, w_1, w_2), (h_0, h_1, h_2), (D_0, D_1, D_2)
        before = convolution.seen_before(o_o[None, :], o_n[:, None], m, i_o * BO, *of, W)
    p_x = x + o_n * I
    b_y = tl.zeros([BO, BN], tl.float32)
    # The first tiles of W are on their way before the wait, and x comes a round early.
    b_x = tl.zeros([BN, BI], x.dtype.element_ty)
    for tile in range(first, last + 1):
        b_w = tile_at(p_w, (tile - 1) * BI + o_i, (o_o >= 0) & (tile > first), I, BI)
        wait_for_last(CHAINED)
        b_next = tile_at(p_x, tile * BI + o_i, m_n & (tile < last), I, BI)
        b_y = tl.dot(b_w, tl.trans(b_x), b_y, input_precision="ieee")
        b_x = b_next
    if SPLIT > 1:
        o_part = o_n[None, :] * BO + tl.arange(0, BO)[:, None]
        p_part = parts + i_o * SPLIT * BN * BO + o_part
        tl.store(p_part + i_s * BN * BO, b_y)
        tl.debug_barrier()
        if tl.atomic_add(arrived + i_o, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(arrived + i_o, 0)
        b_y = tl.zeros([BO, BN], tl.float32)
        for part in tl.static_range(SPLIT):
            b_y += tl.load(p_part + part * BN * BO, cache_modifier=".cg")
    if GATED:
        b_both = b_y.to(y.dtype.element_ty).to(tl.float32)
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, [BO // 2, 2, BN]), [0, 2, 1]))
        b_y = b_gate * tl.sigmoid(b_gate) * b_up
        o_o = i_o * (BO // 2) + tl.arange(0, BO // 2)
        m_o = o_o < O
    b_y = tl.trans(b_y)
    if W > 0:
        b_y = convolution.convolve_within(b_y, before, m, W, ACTIVATED)
    p_y = y + o_n[:, None].to(tl.int64) * O + o_o[None, :]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_n[:, None] & m_o[None, :])


def few_rows(
    x: Tensor, weight: Tensor, gated: bool = False, within: Within | None = None
) -> Tensor:
    """y [N, O] of x [N, I] and weight [O, I], both contiguous; gated: h [N, O / 2]."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks = cdiv(weight.shape[0], OUTPUTS)
    ring = takes_ring(x, weight)
    # None of the programs that share channels is without a tile.
    split = max(1, min(MOST_PARTS, PROGRAMS[ring] // blocks, cdiv(inputs, CHANNELS)))
    # From 16 on a row has the same bits however many there are.
    width = max(16, power_of_2(rows))
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    parts = arrived = None
    if split > 1:
        parts = torch.empty(blocks * split * width * OUTPUTS, device=x.device)
        arrived = counters(x.device)
    values = {"x": x, "weight": weight, "y": y, "parts": parts, "arrived": arrived, "N": rows}
    values |= {"O": outputs, "I": inputs, "BO": OUTPUTS, "BN": width, "BI": CHANNELS}
    values |= {"SPLIT": split, "GATED": gated, "num_warps": 4}
    values |= {**convolution.values_of(within), **chained()}
    if ring:
        # Gluon is imported where it runs.
        from deltarule.ops.fused.few_rows_gluon import few_rows_kernel as kernel
        from deltarule.ops.runtime.gluon_tiles import FusedLaunch

        tiles: dict[str, Any] = {"x": (inputs, [width, CHANNELS])}
        tiles["weight"] = inputs, [OUTPUTS, CHANNELS]
        if gated:
            tiles["weight"] = (outputs, inputs), [2, OUTPUTS // 2, CHANNELS]
        values["SLOTS"] = SLOTS
        launch(kernel, (blocks * split, 1, 1), values, tiles, FusedLaunch)
    else:
        values["num_stages"] = STAGES
        launch(few_rows_kernel, (blocks, split, 1), values)
    return y


def takes_ring(x: Tensor, weight: Tensor) -> bool:
    """Whether rows are many enough, and a Hopper's copy engine fetches both."""
    if not x.is_cuda or len(x) <= NARROW or x.dtype.itemsize != 2 or x.shape[1] % 8:
        return False
    aligned = (x.data_ptr() | weight.data_ptr()) % ALIGNED == 0
    return aligned and is_hopper(x.device)
