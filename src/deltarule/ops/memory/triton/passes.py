"""Launches the kernels of a memory, which `ttt` and `titans` share."""

from typing import Any

import torch
import triton
from torch import Tensor

from deltarule.ops.memory.triton.backward import memory_backward_kernel, read_backward_kernel
from deltarule.ops.memory.triton.network_backward import (
    TILES,
    network_backward_kernel,
    network_read_backward_kernel,
)
from deltarule.ops.memory.triton.network_scan import network_scan_kernel
from deltarule.ops.memory.triton.scan import memory_scan_kernel
from deltarule.ops.runtime.launch import launch

# Written out, because Triton's default follows an environment variable. Nothing is pipelined: W
# is an operand of products and changes in registers too.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True}
WARPS, WARPS_OF_SMALL_MAPS = 8, 4
# Numbers of a block of a map that is streamed, and its columns at most.
BLOCK, COLUMNS = 4096, 32

Streams = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


def constants(
    k: Tensor, v: Tensor, memory: Tensor, norm: bool, packed: bool, inner: int
) -> dict[str, Any]:
    """For keys [M, R, HV, S, K], values and memory, [N, HV, 3, V, K + bias] where it is held."""
    heads, slots, channels = k.shape[2:]
    blocks = {"BS": slots, "BK": channels, "BV": v.shape[-1]}
    sizes = {name: max(triton.next_power_of_2(size), 16) for name, size in blocks.items()}
    sizes |= {"HV": heads, "S": slots, "K": channels, "V": v.shape[-1]}
    sizes |= {"NORM": norm, "PACKED": packed, "num_warps": warps(k), **OPTIONS}
    if memory.ndim == 5:
        return sizes | {"BIAS": memory.shape[-1] - channels}
    entering = inner or channels
    columns = min(BLOCK // max(sizes["BK"], sizes["BV"]), COLUMNS)
    return sizes | {
        "C": entering, "BC": max(min(triton.next_power_of_2(entering), columns), 16),
        "SIZE": memory.shape[-1], "PARTS": memory.shape[2], "DEEP": inner > 0, "BIAS": int(norm),
        "num_warps": WARPS,
    }  # fmt: skip


def warps(k: Tensor) -> int:
    """As many warps in a program as a map can be shared among."""
    return WARPS if k.shape[-1] > 32 else WARPS_OF_SMALL_MAPS


def forward(
    streams: Streams,
    memory: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inner: int,
    note: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """z [M, R, HV, S, V], the memory after, and with `note` that before each mini-batch."""
    (_, k, v, *_), owner = streams, streams[-1]
    z, memory = torch.empty_like(v), memory.clone()
    steps, rows = k.shape[:2]
    noted = (
        torch.empty((*k.shape[:3], *memory.shape[2:]), dtype=torch.float32, device=k.device)
        if note
        else None
    )
    launch(
        memory_scan_kernel if memory.ndim == 5 else network_scan_kernel, (rows, k.shape[2], 1),
        (*streams, memory, weight, bias, z, noted, eps, steps, rows),
        constants(k, v, memory, weight is not None, owner is not None, inner),
    )  # fmt: skip
    return z, memory, noted


def backward(
    d_z: Tensor,
    d_memory: Tensor,
    streams: Streams,
    memory: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inner: int,
) -> tuple[Tensor | None, ...]:
    """Gradients by q, k, v, rows, scalars, writes, memory, weight and bias."""
    noted = forward(streams, memory, weight, bias, eps, inner, note=True)[2]
    q, k, v, rows, scalars, writes, full, owner = streams
    sizes = constants(k, v, memory, weight is not None, owner is not None, inner)
    d_q, d_k, d_v, d_rows, d_scalars, d_writes = (torch.empty_like(x) for x in streams[:6])
    at, g, d_g = (torch.empty_like(v) for _ in range(3))
    d_memory, (count, lanes) = d_memory.clone(), k.shape[:2]
    parts = [
        None if x is None else torch.empty((lanes, *x.shape), dtype=torch.float32, device=x.device)
        for x in (weight, bias)
    ]
    every, each = (k.shape[:3].numel(), 1, 1), (lanes, k.shape[2], 1)
    if memory.ndim == 5:
        launch(
            read_backward_kernel, every,
            (q, k, v, rows, writes, noted, weight, bias, d_z, at, g, d_g, d_q, d_k, d_rows,
             d_writes, eps), sizes,
        )  # fmt: skip
        launch(
            memory_backward_kernel, each,
            (q, k, v, rows, scalars, full, owner, noted, weight, bias, d_z, at, g, d_g, d_memory,
             d_k, d_v, d_rows, d_scalars, *parts, eps, count, lanes), sizes,
        )  # fmt: skip
    else:
        shape = *k.shape[:4], inner
        tiles = k.new_empty((*shape[:3], TILES.value, *shape[3:])) if inner else None
        d_x = k.new_empty(shape) if inner else d_k
        launch(
            network_read_backward_kernel, (lanes, k.shape[2], count),
            (q, k, v, rows, writes, full, owner, noted, weight, bias, d_z, at, g, tiles, d_g, d_x,
             d_q, d_k, d_rows, d_writes, eps, lanes), sizes,
        )  # fmt: skip
        launch(
            network_backward_kernel, each,
            (q, k, v, rows, scalars, full, owner, noted, weight, bias, d_z, at, g, tiles, d_g, d_x,
             d_memory, d_k, d_v, d_rows, d_scalars, *parts, eps, count, lanes), sizes,
        )  # fmt: skip
        if weight is not None:
            # In the loss stands k - v.
            d_k -= d_v
    summed = (None if x is None else x.sum(0) for x in parts)
    return d_q, d_k, d_v, d_rows, d_scalars, d_writes, d_memory, *summed
