"""A memory of one map on a GPU: the scan of memory.py in Triton, as a registered operator.

What a mini-batch keeps, adds and forgets is computed in PyTorch as for any memory, and is
differentiated there; the operator has the matrices. A group of ceil(sqrt(M)) mini-batches is one
call, and only the memories between groups are kept for the backward pass, which runs a group once
more.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.memory.torch.memory import Memory, Steps
from deltarule.ops.mini_batches import MiniBatches
from deltarule.ops.operators import Operator
from deltarule.ops.registration import Gradients, Rules


class Norm(NamedTuple):
    """The layer norm of each head inside the loss of `ttt`."""

    weight: Tensor  # [HV, V]
    bias: Tensor
    eps: float


class LinearMemory(NamedTuple):
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
    memory: Tensor  # [N, HV, 3, V, K + bias]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def forward(inputs: LinearMemory) -> tuple[Tensor, Tensor]:
    """z [M, R, HV, S, V] and the memory after the mini-batches."""
    # Triton is an extra, imported where it runs.
    from deltarule.ops.memory.triton import passes as kernels

    *_, memory, weight, bias, eps = inputs
    z, after, _ = kernels.forward(inputs[:8], memory, weight, bias, eps, note=False)
    return z, after


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: LinearMemory
) -> Gradients:
    """Gradients by the tensors that have one."""
    from deltarule.ops.memory.triton import passes as kernels

    *_, memory, weight, bias, eps = inputs
    d_z, d_memory = (
        like.new_zeros(like.shape) if d is None else d.contiguous()
        for d, like in zip(gradients, (inputs.v, memory), strict=True)
    )
    return kernels.backward(d_z, d_memory, inputs[:8], memory, weight, bias, eps)


def fake(inputs: LinearMemory) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs.v), torch.empty_like(inputs.memory)


# Offsets, and which mini-batches end, have no gradient.
DIFFERENTIABLE = ("q", "k", "v", "rows", "scalars", "writes", "memory", "weight", "bias")
memory_operator = Operator(
    "linear_memory", LinearMemory, forward, backward, fake, returned=2,
    rules=Rules(2, gradients=DIFFERENTIABLE, otherwise='use impl="torch"'),
)  # fmt: skip


def scan_linear(
    steps: Steps, memory: Memory, layout: MiniBatches, norm: Norm | None
) -> tuple[Tensor, Memory]:
    """What `memory.scan` computes for a memory of one map."""
    maps = torch.stack([memory.weights[0], memory.momentum[0], memory.anchor[0]], dim=2)
    heads, values = maps.shape[1], maps.shape[3]
    streams, share = mixed_streams(steps), values
    if norm is None:
        share = values_of_program(values, maps.shape[4])
        streams, maps = shared_out(streams, maps, share)
    table = layout.table(maps)
    full = steps.full.flatten(1).float()
    options = (None, None, 0.0) if norm is None else (*norm[:2], norm.eps)
    count = len(full)
    group = math.ceil(math.sqrt(count)) if torch.is_grad_enabled() else count
    outputs = []
    for start in range(0, count, group):
        run = slice(start, start + group)
        owner = None if layout.owner is None else layout.owner[run].contiguous()
        z, table = memory_operator(*(x[run] for x in streams), full[run], owner, table, *options)
        outputs.append(z)
    z, table = torch.cat(outputs), layout.states(table)
    if share < values:
        z = z.unflatten(2, (heads, -1)).movedim(3, -2).flatten(-2)[..., :values]
        table = table.unflatten(1, (heads, -1)).movedim(2, 3).flatten(3, 4)[:, :, :, :values]
    # Each a tensor of its own, as every state is.
    parts = ((x.clone(),) for x in table.unbind(2))
    return z, Memory(*parts)


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
    q, k, v, *others = streams
    fill = -values % share
    v = F.pad(v, (0, fill)).unflatten(-1, (-1, share)).movedim(-2, 3).flatten(2, 3)
    maps = F.pad(maps, (0, 0, 0, fill)).unflatten(3, (-1, share)).movedim(3, 2).flatten(1, 2)
    parts = (values + fill) // share
    q, k, *others = (x.repeat_interleave(parts, dim=2) for x in (q, k, *others))
    return (q, k, v.contiguous(), *others), maps.contiguous()


def mixed_streams(steps: Steps) -> tuple[Tensor, ...]:
    """q, k, v, rows, scalars and writes, as the operator takes them."""
    reads, to_weights, to_momentum = steps.reads, steps.next_weights, steps.next_momentum
    of_token, of_step = steps.k.shape[:4], steps.k.shape[:3]
    rows = torch.stack(
        [
            reads.kept.squeeze(-1).expand(of_token), reads.momentum.squeeze(-1).expand(of_token),
            to_weights.writes.squeeze(-2).expand(of_token),
            to_momentum.writes.squeeze(-2).expand(of_token),
        ],
        dim=-2,
    )  # fmt: skip
    numbers = (to_weights.kept, to_weights.momentum, to_momentum.kept, to_momentum.momentum)
    scalars = torch.stack([x.flatten(-2).squeeze(-1).expand(of_step) for x in numbers], dim=-1)
    given = (steps.q, steps.k, steps.v, rows, scalars, reads.writes)
    return tuple(x.contiguous() for x in given)
