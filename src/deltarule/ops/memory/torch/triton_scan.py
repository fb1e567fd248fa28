"""A memory of one or two maps on a GPU: the scan of memory.py in Triton, as a registered operator.

What a mini-batch keeps, adds and forgets is computed in PyTorch as for any memory, and is
differentiated there; the operator has the matrices. A group of ceil(sqrt(M)) mini-batches is one
call, and only the memories between groups are kept for the backward pass, which runs a group once
more.

The maps lie as their kernels take them: one or two, each without its bias and then that, one after
another. Without a norm the value channels of a single map know nothing of each other: programs
share them, as if they were heads.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.fused_kernels import kernel_operator
from deltarule.ops.memory.inputs import STREAMED_CHANNELS
from deltarule.ops.memory.torch.memory import Maps, Memory, Norm, Steps
from deltarule.ops.mini_batches import MiniBatches
from deltarule.ops.registration import Rules
from deltarule.ops.runtime.sizes import cdiv


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
    memory: Tensor  # [N, HV, parts, numbers]
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
    parts: tuple[Maps, ...] = memory if norm is None else memory[:2]
    keys, (heads, _, values) = steps.k.shape[-1], steps.v.shape[2:]
    share = values
    if norm is None and len(memory.weights) == 1:
        share = cdiv(values, cdiv(values, STREAMED_CHANNELS))
        streams, parts = shared_out(streams, parts, share)
    table = layout.table(torch.stack([flat(maps, keys) for maps in parts], dim=2))
    sizes = [x.shape[-2:] for x in parts[0]]
    z, table = grouped(streams, layout, norm, table, sizes[0][0] if len(sizes) > 1 else 0)
    after = [unflat(x, sizes, keys) for x in layout.states(table).unbind(2)]
    if share < values:
        z = z.unflatten(2, (heads, -1)).movedim(3, -2).flatten(-2)[..., :values]
        together = (x.unflatten(1, (heads, -1)).flatten(2, 3)[:, :, :values] for (x,) in after)
        after = [(x.contiguous(),) for x in together]
    # The anchor of `ttt` is W.
    return z, Memory(*(after if norm is None else (*after, after[0])))


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


def shared_out(
    streams: tuple[Tensor, ...], parts: tuple[Maps, ...], share: int
) -> tuple[tuple[Tensor, ...], tuple[Maps, ...]]:
    """Heads of `share` value channels each: more heads, which read the same keys."""
    q, k, v, *others, full = streams
    if share == v.shape[-1]:
        return streams, parts
    fill = -v.shape[-1] % share
    v = F.pad(v, (0, fill)).unflatten(-1, (-1, share)).movedim(-2, 3).flatten(2, 3)
    maps = (F.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, share)).flatten(1, 2) for (x,) in parts)
    copies = v.shape[2] // q.shape[2]
    q, k, *others = (x.repeat_interleave(copies, dim=2) for x in (q, k, *others))
    return (q, k, v.contiguous(), *others, full), tuple((x,) for x in maps)
