"""A memory of one map on a GPU: the scan of memory.py in Triton, as a registered operator.

What a mini-batch keeps, adds and forgets is computed in PyTorch as for any memory, and is
differentiated there; the operator has the matrices. A group of ceil(sqrt(M)) mini-batches is one
call, and only the memories between groups are kept for the backward pass, which runs a group once
more.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.memory.torch.memory import Memory, Steps
from deltarule.ops.mini_batches import MiniBatches

# The tensors of the operator, q to bias, that have a gradient.
DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 8, 9, 10)
NO_DERIVATIVE = (
    "a memory in Triton has a first reverse-mode derivative only: for forward-mode or second "
    'derivatives use impl="torch"'
)


class Norm(NamedTuple):
    """The layer norm of each head inside the loss of `ttt`."""

    weight: Tensor  # [HV, V]
    bias: Tensor
    eps: float


@torch.library.custom_op("deltarule::linear_memory", mutates_args=())
def memory_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    scalars: Tensor,
    writes: Tensor,
    full: Tensor,
    owner: Tensor | None,
    memory: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """z [M, R, HV, S, V] and the memory [N, HV, 3, V, K + bias] after the mini-batches.

    rows [M, R, HV, 4, S], scalars [M, R, HV, 4] and writes [M, R, HV, S, S] say what is mixed;
    full [M, R] which mini-batches end, owner [M, R] of packed tokens whose they are.
    """
    # Triton is an extra, imported where it runs.
    from deltarule.ops.memory.triton import passes as kernels

    streams = q, k, v, rows, scalars, writes, full, owner
    return kernels.forward(streams, memory, weight, bias, eps, note=False)[:2]


@torch.library.custom_op("deltarule::linear_memory_backward", mutates_args=())
def memory_backward_op(
    d_z: Tensor,
    d_memory: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    scalars: Tensor,
    writes: Tensor,
    full: Tensor,
    owner: Tensor | None,
    memory: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> list[Tensor]:
    """Gradients by the tensors that have one; an empty tensor for None."""
    from deltarule.ops.memory.triton import passes as kernels

    streams = q, k, v, rows, scalars, writes, full, owner
    gradients = kernels.backward(d_z, d_memory, streams, memory, weight, bias, eps)
    return [q.new_empty(0) if x is None else x for x in gradients]


@memory_op.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(others[5])


@memory_backward_op.register_fake
def _backward_fake(d_z: Tensor, d_memory: Tensor, *args: Any) -> list[Tensor]:
    given = (args[i] for i in DIFFERENTIABLE)
    return [d_z.new_empty(0) if x is None else torch.empty_like(x) for x in given]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:11])
    ctx.eps = inputs[11]


def _backward(ctx: Any, d_z: Tensor, d_memory: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    gradients = memory_backward_op(d_z.contiguous(), d_memory.contiguous(), *tensors, ctx.eps)
    by_place = dict(zip(DIFFERENTIABLE, gradients, strict=True))
    return *(None if x is None else by_place.get(i) for i, x in enumerate(tensors)), None


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(NO_DERIVATIVE)


memory_op.register_autograd(_backward, setup_context=_setup_context)
memory_backward_op.register_autograd(_no_second_derivative)


def scan_linear(
    steps: Steps, memory: Memory, layout: MiniBatches, norm: Norm | None
) -> tuple[Tensor, Memory]:
    """What `memory.scan` computes for a memory of one map."""
    maps = torch.stack([memory.weights[0], memory.momentum[0], memory.anchor[0]], dim=2)
    table = layout.table(maps)
    streams = mixed_streams(steps)
    full = steps.full.flatten(1).float()
    options = (None, None, 0.0) if norm is None else (*norm[:2], norm.eps)
    count = len(full)
    group = math.ceil(math.sqrt(count)) if torch.is_grad_enabled() else count
    outputs = []
    for start in range(0, count, group):
        run = slice(start, start + group)
        owner = None if layout.owner is None else layout.owner[run].contiguous()
        z, table = memory_op(*(x[run] for x in streams), full[run], owner, table, *options)
        outputs.append(z)
    weights, momentum, anchor = layout.states(table).unbind(2)
    # Each a tensor of its own, as every state is.
    parts = ((x.clone(),) for x in (weights, momentum, anchor))
    return torch.cat(outputs), Memory(*parts)


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
