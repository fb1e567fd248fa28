"""Launches the kernels of `selective_scan`: chunks side by side, the state in float32.

Between the kernels there is one state for each chunk and, inside the backward, one for each group
of tokens; nothing of a token is kept.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.runtime.named import launch
from deltarule.ops.runtime.sizes import cdiv, power_of_2
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.ops.selective_scan.torch import tokens_in_chunk
from deltarule.ops.selective_scan.triton.kernels import (
    Sizes,
    carry_kernel,
    chunk_summary_kernel,
    read_backward_kernel,
    read_kernel,
)


class Tile(NamedTuple):
    """How many entries of the state a program has, how many a warp, and how wide it may be."""

    entries: int
    of_warp: int
    widest: int


# 16 registers of a thread; and half as many, because the backward holds several such tiles.
FORWARD, BACKWARD = Tile(4096, 512, 32), Tile(2048, 256, 16)
MOST_WARPS = 8
# Tokens whose states the backward holds in registers at once; a constant k or q needs room too.
HELD, HELD_BESIDE_CONSTANTS = 4, 2
# Entries of the state that one program carries from chunk to chunk.
CARRIED = 128
# Nothing is pipelined: loads are ahead by the unrolled loops.
OPTIONS: dict[str, Any] = {"num_stages": 1}


class Plan(NamedTuple):
    """Sizes of one call: M chunks of CT tokens, tiles of BK keys and BV values."""

    chunks: int
    grid: tuple[int, int, int]
    # A sequence is one chunk, so that there is nothing to carry.
    single: bool
    # The constants of the kernels over the chunks, and their warps.
    sizes: Sizes
    num_warps: int


def make_plan(inputs: ScanInputs, tile: Tile = FORWARD) -> Plan:
    """A function of shapes alone."""
    batch, tokens, heads, value_size = inputs.v.shape
    key_size, size = inputs.q.shape[-1], tokens_in_chunk(inputs)
    packed = inputs.cu_seqlens is not None
    chunks = tokens // size + inputs.sequences if packed else batch * -(-tokens // size)
    block_k = power_of_2(key_size)
    block_v = min(tile.widest, max(tile.entries // block_k, 1), power_of_2(value_size))
    HQ, HK = (0 if x.ndim == 3 else x.shape[2] for x in (inputs.q, inputs.k))
    held = min(HELD if HQ and HK else HELD_BESIDE_CONSTANTS, size)
    shape = HQ, HK, heads, value_size, key_size, size, block_k, block_v, held
    sizes, grid = Sizes(*shape, packed, inputs.signed), (chunks, heads, cdiv(value_size, block_v))
    warps = min(max(block_k * block_v // tile.of_warp, 1), MOST_WARPS)
    return Plan(chunks, grid, not packed and 0 < tokens <= size, sizes, warps)


def arguments(inputs: ScanInputs, plan: Plan) -> dict[str, Any]:
    own = {"T": inputs.v.shape[1], "N": inputs.sequences, "S": plan.sizes}
    return inputs._asdict() | own | OPTIONS | {"num_warps": plan.num_warps}


def saved_shape(inputs: ScanInputs) -> tuple[int, int, int, int]:
    """[M, HV, V, K]: the state at the start of each chunk; none where a chunk is a sequence."""
    plan = make_plan(inputs)
    return 0 if plan.single else plan.chunks, *inputs.state_shape[1:]


def forward(inputs: ScanInputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states at the starts of the chunks (none without `save`)."""
    inputs, plan = contiguous(inputs), make_plan(inputs)
    device = inputs.v.device
    o = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=device)
    final_state = torch.empty(inputs.state_shape, dtype=torch.float32, device=device)
    starts = inputs.initial_state
    if not plan.single:
        starts = carried(inputs, plan, None, inputs.initial_state, final_state)
    if plan.chunks:
        values = arguments(inputs, plan) | {"states": starts, "o": o}
        values["final_state"] = final_state if plan.single else None
        launch(read_kernel, plan.grid, values)
    if not save or plan.single or starts is None:
        starts = torch.empty((0, *inputs.state_shape[1:]), dtype=torch.float32, device=device)
    return o, final_state, starts


def carried(
    inputs: ScanInputs, plan: Plan, d_o: Tensor | None, before: Tensor | None, after: Tensor
) -> Tensor:
    """[M, HV, V, K] the state at the start of every chunk; of d_o, the gradient at its end."""
    shape, size = (plan.chunks, *inputs.state_shape[1:]), math.prod(inputs.state_shape[1:])
    device = inputs.v.device
    local, left = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    sizes = plan.sizes._replace(REVERSE=d_o is not None)
    values = arguments(inputs, plan) | {"d_o": d_o, "S": sizes}
    values |= {"before": before, "local": local, "left": left, "after": after}
    if plan.chunks and inputs.v.shape[1]:
        launch(chunk_summary_kernel, plan.grid, values)
    if inputs.sequences:
        grid = inputs.sequences, cdiv(size, CARRIED), 1
        sizes = sizes._replace(SIZE=size, BE=CARRIED)
        launch(carry_kernel, grid, values | {"S": sizes, "num_warps": 4})
    return local


def backward(
    d_o: Tensor, d_final: Tensor | None, inputs: ScanInputs, saved: Tensor, spent: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients by q, k, v, delta, A, the decays, beta and initial_state; None for what is None.

    None in place of d_final stands for zeros.
    """
    given, inputs, plan = inputs, contiguous(inputs), make_plan(inputs)
    d_initial = torch.empty(inputs.state_shape, dtype=torch.float32, device=d_o.device)
    d_final = torch.zeros_like(d_initial) if d_final is None else d_final
    starts, ends = inputs.initial_state, d_final
    if not plan.single:
        starts = saved
        if saved.numel() == 0:
            unused = torch.empty_like(d_initial)
            starts = carried(inputs, plan, None, inputs.initial_state, unused)
        ends = carried(inputs, plan, d_o, d_final, d_initial)
    plan = make_plan(inputs, BACKWARD)
    parts = partial_gradients(inputs, plan)
    if plan.chunks:
        own = plan.sizes
        size = own.CT // own.G, own.BK * own.BV
        noted = torch.empty(*plan.grid, *size, dtype=torch.float32, device=d_o.device)
        values = arguments(inputs, plan) | {f"d_{name}": part for name, part in parts.items()}
        values |= {"states": starts, "ends": ends, "noted": noted, "d_o": d_o}
        values["d_initial"] = d_initial if plan.single else None
        values["s_part"] = inputs.v.shape[:2].numel()
        launch(read_backward_kernel, plan.grid, values)
    gradients = [
        None if x is None or part is None
        else part if part.ndim == x.ndim else part.sum(0).to(x.dtype)
        for x, part in zip(given[:8], parts.values(), strict=True)
    ]  # fmt: skip
    return *gradients, None if inputs.initial_state is None else d_initial


def partial_gradients(inputs: ScanInputs, plan: Plan) -> dict[str, Tensor | None]:
    chunks, heads, blocks = plan.grid
    # The numbers of packed chunks leave gaps.
    of_chunks = torch.zeros if plan.sizes.PACKED else torch.empty
    parts: dict[str, Tensor | None] = {}
    for name, x in zip(inputs._fields[:8], inputs[:8], strict=True):
        if x is None:
            parts[name] = None
        elif x.ndim == 3:
            parts[name] = of_chunks(chunks, *x.shape, dtype=torch.float32, device=x.device)
        elif name in ("q", "k", "log_decay"):
            sharing = heads // x.shape[2]
            parts[name] = x.new_empty(blocks * sharing, *x.shape, dtype=torch.float32)
        else:
            parts[name] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return parts


def contiguous(inputs: ScanInputs) -> ScanInputs:
    tensors: dict[str, Any] = {
        name: x.to(inputs.v.device).contiguous()
        for name, x in inputs._asdict().items()
        if isinstance(x, Tensor)
    }
    return inputs._replace(**tensors)
