"""A memory of one or two maps on a GPU: the scan of memory.py in Triton, as a registered operator.

What a mini-batch keeps, adds and forgets is computed in PyTorch as for any memory, and is
differentiated there; the operator has the matrices. A group of ceil(sqrt(M)) mini-batches is one
call, and only the memories between groups are kept for the backward pass, which runs a group once
more.

The maps lie as their kernels take them. Held in registers: one map, W, M and A beside each other.
Streamed from the cache: one map or two, each without its bias and then that, one after another.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.fused_kernels import kernel_operator
from deltarule.ops.memory.inputs import is_held
from deltarule.ops.memory.torch.memory import Maps, Memory, Norm, Steps
from deltarule.ops.mini_batches import MiniBatches
from deltarule.ops.registration import Rules


class Scan(NamedTuple):
    """Mini-batches of M steps and R rows, and the memories that they begin with.

    q, k [M, R, HV, S, K] and v [M, R, HV, S, V]; rows [M, R, HV, 4, S], scalars [M, R, HV, 4] and
    writes [M, R, HV, S, S] say what is mixed; full [M, R] which mini-batches end, owner [M, R] of
    packed tokens whose they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor
    scalars: Tensor
    writes: Tensor
    full: Tensor
    owner: Tensor | None
    memory: Tensor  # held [N, HV, 3, V, K + bias], or streamed [N, HV, parts, numbers]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    inner: int  # channels between two maps; 0 with one map


# Offsets, and which mini-batches end, have no gradient.
DIFFERENTIABLE = ("q", "k", "v", "rows", "scalars", "writes", "memory", "weight", "bias")
RULES = Rules(2, gradients=DIFFERENTIABLE, otherwise='use impl="torch"')
scan_operator = kernel_operator(
    "memory_scan", Scan, "memory.triton.passes",
    lambda given: (torch.empty_like(given.v), torch.empty_like(given.memory)), RULES, 2,
)  # fmt: skip


def scan_in_triton(
    steps: Steps, memory: Memory, layout: MiniBatches, norm: Norm | None
) -> tuple[Tensor, Memory]:
    """What `memory.scan` computes for a memory of one or two maps."""
    reads, to_weights, to_momentum = steps.reads, steps.next_weights, steps.next_momentum
    of_token, of_step = steps.k.shape[:4], steps.k.shape[:3]
    columns = [x.squeeze(-1) for x in (reads.kept, reads.momentum)]
    columns += [x.writes.squeeze(-2) for x in (to_weights, to_momentum)]
    rows = torch.stack([x.expand(of_token) for x in columns], dim=-2)
    numbers = (to_weights.kept, to_weights.momentum, to_momentum.kept, to_momentum.momentum)
    scalars = torch.stack([x.flatten(-2).squeeze(-1).expand(of_step) for x in numbers], dim=-1)
    given = (steps.q, steps.k, steps.v, rows, scalars, reads.writes, steps.full.flatten(1).float())
    streams = tuple(x.contiguous() for x in given)
    if is_held(memory.weights, norm is not None):
        return scan_held(streams, memory, layout, norm)
    parts = memory if norm is None else memory[:2]
    table = layout.table(torch.stack([flat(maps, steps.k.shape[-1]) for maps in parts], dim=2))
    sizes = [x.shape[-2:] for x in memory.weights]
    z, table = grouped(streams, layout, norm, table, sizes[0][0] if len(sizes) > 1 else 0)
    after = [unflat(x, sizes, steps.k.shape[-1]) for x in layout.states(table).unbind(2)]
    # The anchor of `ttt` is W.
    return z, Memory(*(after if norm is None else (*after, after[0])))


def scan_held(
    streams: tuple[Tensor, ...], memory: Memory, layout: MiniBatches, norm: Norm | None
) -> tuple[Tensor, Memory]:
    """Scan a memory of one map; programs share its value channels where it has no norm."""
    maps = torch.stack([memory.weights[0], memory.momentum[0], memory.anchor[0]], dim=2)
    heads, values = maps.shape[1], maps.shape[3]
    share = values
    if norm is None:
        share = values_of_program(values, maps.shape[4])
        streams, maps = shared_out(streams, maps, share)
    z, table = grouped(streams, layout, norm, layout.table(maps), 0)
    table = layout.states(table)
    if share < values:
        z = z.unflatten(2, (heads, -1)).movedim(3, -2).flatten(-2)[..., :values]
        table = table.unflatten(1, (heads, -1)).movedim(2, 3).flatten(3, 4)[:, :, :, :values]
    # Each a tensor of its own, as every state is.
    parts = ((x.clone(),) for x in table.unbind(2))
    return z, Memory(*parts)


def grouped(
    streams: tuple[Tensor, ...], layout: MiniBatches, norm: Norm | None, table: Tensor, inner: int
) -> tuple[Tensor, Tensor]:
    """z and the table of memories after all mini-batches, group by group."""
    options = (None, None, 0.0) if norm is None else (*norm[:2], norm.eps)
    count = layout.steps
    group = math.ceil(math.sqrt(count)) if torch.is_grad_enabled() else count
    outputs = []
    for start in range(0, count, group):
        run = slice(start, start + group)
        owner = None if layout.owner is None else layout.owner[run].contiguous()
        z, table = scan_operator(*(x[run] for x in streams), owner, table, *options, inner)
        outputs.append(z)
    return torch.cat(outputs), table


def flat(maps: Maps, channels: int) -> Tensor:
    """[N, HV, numbers]: of each map the columns for what enters it, and then that of the bias."""
    found = []
    for x in maps:
        found += [x[..., :channels].flatten(-2), x[..., channels:].flatten(-2)]
        channels = x.shape[-2]
    return torch.cat(found, dim=-1)


def unflat(x: Tensor, sizes: Sequence[torch.Size], channels: int) -> Maps:
    maps, start = [], 0
    for outputs, inputs in sizes:
        between, end = start + outputs * channels, start + outputs * inputs
        columns = x[..., start:between].unflatten(-1, (outputs, channels))
        bias = x[..., between:end].unflatten(-1, (outputs, inputs - channels))
        maps.append(torch.cat([columns, bias], dim=-1))
        start, channels = end, outputs
    return tuple(maps)


# Numbers of a map that a program holds, and value channels of them.
ENTRIES, MOST = 4096, 64


def values_of_program(values: int, keys: int) -> int:
    """Value channels of a program: all, or as many as fit beside so many key channels."""
    return min(values, ENTRIES // (1 << (keys - 1).bit_length()), MOST)


def shared_out(
    streams: tuple[Tensor, ...], maps: Tensor, share: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Heads of `share` value channels each: more heads, which read the same keys."""
    values = maps.shape[3]
    if share == values:
        return streams, maps
    q, k, v, *others, full = streams
    fill = -values % share
    v = F.pad(v, (0, fill)).unflatten(-1, (-1, share)).movedim(-2, 3).flatten(2, 3)
    maps = F.pad(maps, (0, 0, 0, fill)).unflatten(3, (-1, share)).movedim(3, 2).flatten(1, 2)
    parts = (values + fill) // share
    q, k, *others = (x.repeat_interleave(parts, dim=2) for x in (q, k, *others))
    return (q, k, v.contiguous(), *others, full), maps.contiguous()
