"""Launches the kernels of a memory, which `ttt` and `titans` share."""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.memory.inputs import HELD_CHANNELS
from deltarule.ops.memory.torch.triton_scan import Scan
from deltarule.ops.memory.triton.network import Sizes, held_scan_kernel, network_scan_kernel
from deltarule.ops.memory.triton.network_backward import (
    TILES,
    network_backward_kernel,
    network_read_backward_kernel,
)
from deltarule.ops.registration import Backward, Gradients
from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import power_of_2

# Nothing is pipelined: W is an operand of products and changes in registers too.
OPTIONS = {"num_stages": 1}
WARPS, WARPS_OF_SMALL_MAPS = 8, 4
# Numbers of a block of a map that is streamed, and its columns at most.
BLOCK, COLUMNS = 4096, 32


def arguments(inputs: Scan) -> dict[str, Any]:
    (count, lanes, heads, tokens, channels), values = inputs.k.shape, inputs.v.shape[-1]
    sizes: dict[str, Any] = {"HV": heads, "T": tokens, "K": channels, "V": values}
    blocks = {"BT": tokens, "BK": channels, "BV": values}
    sizes |= {name: max(power_of_2(size), 16) for name, size in blocks.items()}
    norm, entering = inputs.weight is not None, inputs.inner or channels
    sizes |= {"NORM": norm, "BIAS": int(norm), "PACKED": inputs.owner is not None}
    columns = min(BLOCK // max(sizes["BK"], sizes["BV"]), COLUMNS)
    sizes |= {"C": entering, "BC": max(min(power_of_2(entering), columns), 16)}
    _, _, parts, size = inputs.memory.shape
    sizes |= {"SIZE": size, "PARTS": parts, "DEEP": inputs.inner > 0}
    # As many warps as a map can be shared among.
    own = {"M": count, "R": lanes, "S": Sizes(**sizes)}
    own["num_warps"] = WARPS if inputs.inner or channels > 32 else WARPS_OF_SMALL_MAPS
    return {**inputs._asdict(), **OPTIONS, **own}


def is_held(inputs: Scan) -> bool:
    """Whether a forward holds this memory in registers; it streams others from the cache."""
    return not inputs.inner and max(inputs.k.shape[-1], inputs.v.shape[-1]) <= HELD_CHANNELS


def memory_scan(inputs: Scan) -> tuple[Tensor, Tensor]:
    """z [M, R, HV, T, V] and the memory after the mini-batches."""
    return forward(inputs)[:2]


def memory_scan_backward(given: Backward[Scan]) -> Gradients:
    inputs = given.inputs
    d_z, d_memory = (
        like.new_zeros(like.shape) if d is None else d.contiguous()
        for d, like in zip(given.gradients, (inputs.v, inputs.memory), strict=True)
    )
    return backward(d_z, d_memory, inputs)


def forward(inputs: Scan, note: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    z, memory, each = torch.empty_like(inputs.v), inputs.memory.clone(), inputs.k.shape[:3]
    noted = memory.new_empty(*each, *memory.shape[2:]) if note else None
    kernel = held_scan_kernel if is_held(inputs) and not note else network_scan_kernel
    values = arguments(inputs) | {"memory": memory, "z": z, "noted": noted}
    launch(kernel, (*each[1:], 1), values)
    return z, memory, noted


def backward(d_z: Tensor, d_memory: Tensor, inputs: Scan) -> Gradients:
    k, inner = inputs.k, inputs.inner
    count, lanes, heads, slots, _ = k.shape
    names = "q", "k", "v", "rows", "scalars", "writes"
    found = {f"d_{name}": torch.empty_like(getattr(inputs, name)) for name in names}
    norm = inputs.weight, inputs.bias
    d_norm = [None if x is None else k.new_empty(lanes, *x.shape) for x in norm]
    values = arguments(inputs) | found | {"d_weight": d_norm[0], "d_bias": d_norm[1]}
    values |= {name: torch.empty_like(inputs.v) for name in ("at", "g", "d_g")}
    d_memory, noted = d_memory.clone(), forward(inputs, note=True)[2]
    values |= {"d_z": d_z, "d_memory": d_memory, "noted": noted}
    # What enters the last map of two, and its gradient.
    shape = count, lanes, heads, TILES.value, slots, inner
    values["tiles"] = k.new_empty(shape) if inner else None
    values["d_x"] = k.new_empty(*shape[:3], slots, inner) if inner else found["d_k"]
    launch(network_read_backward_kernel, (lanes, heads, count), values)
    launch(network_backward_kernel, (lanes, heads, 1), values)
    if inputs.weight is not None:
        # In the loss stands k - v.
        found["d_k"] -= found["d_v"]
    return *found.values(), d_memory, *(None if x is None else x.sum(0) for x in d_norm)
