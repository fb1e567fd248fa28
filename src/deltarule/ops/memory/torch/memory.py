"""A small network as the state: its gradient steps by mini-batches, in matrix products only.

The memory is a chain of maps z_1 = W_1 x_1, x_2 = gelu(z_1), z_2 = W_2 x_2, .., with W [outputs,
inputs]; one more column than x has channels is a bias. The gradients of a mini-batch are all taken
where it starts, so that of map l for token i is the outer product g_{l,i} x_{l,i}^T, and every
memory inside the mini-batch is

    W_l,t = kept_t W_l + momentum_t M_l - sum_i writes_ti g_{l,i} x_{l,i}^T

with numbers kept, momentum and writes that make the system: `ttt` and `titans`. No W_l,t is formed
(the dual form):

    W_l,t y = kept_t W_l y + momentum_t M_l y - sum_i writes_ti (x_{l,i} . y) g_{l,i}
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltarule.ops.mini_batches import MiniBatches

Maps = tuple[Tensor, ...]
# Bytes of memories that a backward pass keeps all of: fewer are not worth a second run, nor that
# PyTorch's `checkpoint` loads the compiler, which takes a second.
KEPT = 2**20
# (network output z, keys, values) -> gradient of the loss by z, all [R, HV, S, channels]
LossGradient = Callable[[Tensor, Tensor, Tensor], Tensor]


class Norm(NamedTuple):
    """The layer norm of each head inside the loss of `ttt`."""

    weight: Tensor  # [HV, V]
    bias: Tensor
    eps: float


class Memory(NamedTuple):
    """The maps of every row, each a tuple over l of [R, HV, outputs, inputs]."""

    weights: Maps
    momentum: Maps
    anchor: Maps  # where the gradients of the mini-batch are taken

    def map(self, f: Callable[[Tensor], Tensor]) -> "Memory":
        return Memory(*(tuple(f(x) for x in maps) for maps in self))


class Mix(NamedTuple):
    """How `rows` memories are put together from W, M and the writes of S tokens."""

    kept: Tensor  # [.., rows, 1]
    momentum: Tensor  # [.., rows, 1]
    writes: Tensor  # [.., rows, S]

    def at(self, step: int) -> "Mix":
        return Mix(self.kept[step], self.momentum[step], self.writes[step])


class Steps(NamedTuple):
    """What a scan reads, the mini-batch first."""

    q: Tensor  # [M, R, HV, S, K]
    k: Tensor
    v: Tensor
    reads: Mix  # the memory that each token reads
    next_weights: Mix  # what W and M are at the end: one row
    next_momentum: Mix
    full: Tensor  # [M, R, 1, 1, 1] whether the mini-batch ends, and the anchor moves


def train(k: Tensor, v: Tensor, anchor: Maps, loss_gradient: LossGradient) -> tuple[Maps, Maps]:
    """x_l and g_l of each map: the network on the keys, and the loss back through it.

    g_L = dloss/dz_L        g_l = (W_{l+1}^T g_{l+1}) gelu'(z_l)
    """
    inputs, z = [with_bias(k, anchor[0])], []
    for index, weights in enumerate(anchor):
        z.append(inputs[index] @ weights.mT)
        if index + 1 < len(anchor):
            inputs.append(with_bias(F.gelu(z[index], approximate="tanh"), anchor[index + 1]))
    gradients = [loss_gradient(z[-1], k, v)]
    for weights, inner in zip(anchor[:0:-1], z[-2::-1], strict=True):
        by_input = gradients[0] @ weights[..., : inner.shape[-1]]
        gradients.insert(0, by_input * gelu_slope(inner))
    return tuple(inputs), tuple(gradients)


def read(q: Tensor, memory: Memory, mix: Mix, inputs: Maps, gradients: Maps) -> Tensor:
    """The network on the queries, each with its own memory, in the dual form."""
    y, z = q, q
    maps = zip(memory.weights, memory.momentum, inputs, gradients, strict=True)
    for index, (weights, momentum, x, g) in enumerate(maps):
        y = with_bias(F.gelu(z, approximate="tanh") if index else z, weights)
        written = ((y @ x.mT) * mix.writes) @ g
        z = mix.kept * (y @ weights.mT) + mix.momentum * (y @ momentum.mT) - written
    return z


def mixed(memory: Memory, mix: Mix, inputs: Maps, gradients: Maps) -> Maps:
    maps = zip(memory.weights, memory.momentum, inputs, gradients, strict=True)
    return tuple(
        mix.kept * weights + mix.momentum * momentum - (g * mix.writes.mT).mT @ x
        for weights, momentum, x, g in maps
    )


def mini_batch(
    steps: Steps, step: int, memory: Memory, loss_gradient: LossGradient
) -> tuple[Tensor, Memory]:
    """The hot stage: read with every token's memory, and move on to the next mini-batch."""
    inputs, gradients = train(steps.k[step], steps.v[step], memory.anchor, loss_gradient)
    z = read(steps.q[step], memory, steps.reads.at(step), inputs, gradients)
    weights = mixed(memory, steps.next_weights.at(step), inputs, gradients)
    momentum = mixed(memory, steps.next_momentum.at(step), inputs, gradients)
    full = steps.full[step]
    anchor = tuple(
        torch.where(full, new, old) for new, old in zip(weights, memory.anchor, strict=True)
    )
    return z, Memory(weights, momentum, anchor)


def scan(
    steps: Steps, memory: Memory, layout: MiniBatches, loss_gradient: LossGradient
) -> tuple[Tensor, Memory]:
    """Network outputs [M, R, HV, S, V], and the memories [N, ..] after the last token of each.

    A backward pass keeps the memories at every ceil(sqrt(M))-th mini-batch only, and runs the
    mini-batches between them once more, unless all of them are small.
    """
    scanned: Callable[..., tuple[Tensor, Memory]] = _scan_group
    # Function transforms and the compiler do not follow saved-tensor hooks, nor ask for sizes.
    followed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    saves = torch.is_grad_enabled() and not followed
    if saves and layout.steps * sum(x.nbytes for maps in memory for x in maps) > KEPT:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        scanned = partial(checkpoint, _scan_group, **options)
    group = math.ceil(math.sqrt(layout.steps))
    parts = []
    for start in range(0, layout.steps, group):
        run = range(start, min(start + group, layout.steps))
        z, memory = scanned(steps, run, memory, layout, loss_gradient)
        parts.append(z)
    return torch.cat(parts), memory


def loss_gradient(norm: Norm | None) -> LossGradient:
    """d/dz of |z - v|^2, or with a norm of 1/2 |k + LN(z) - v|^2.

    With c = (z - mean) / std and e = weight (LN(z) + k - v):
    dz = (e - mean(e) - c mean(e c)) / std
    """
    if norm is None:
        return lambda z, k, v: 2 * (z - v)
    weight, bias = (x.unsqueeze(-2) for x in norm[:2])

    def gradient(z: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c, inverse_std = centred(z, norm.eps)
        e = weight * (weight * c + bias + k - v)
        return inverse_std * (e - e.mean(-1, keepdim=True) - c * (e * c).mean(-1, keepdim=True))

    return gradient


def centred(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(z - mean) / sqrt(variance + eps), and that factor."""
    z = z - z.mean(-1, keepdim=True)
    inverse_std = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return z * inverse_std, inverse_std


def with_bias(x: Tensor, weights: Tensor) -> Tensor:
    """Append a channel of ones where the map has a column for it."""
    if weights.shape[-1] == x.shape[-1]:
        return x
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


def gelu_slope(x: Tensor) -> Tensor:
    """d gelu(x) / dx, of the form with tanh: gelu(x) = x (1 + t) / 2, t = tanh(c (x + a x^3))."""
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (c * (1 + 3 * a * x * x))


def _scan_group(
    steps: Steps, run: range, memory: Memory, layout: MiniBatches, loss_gradient: LossGradient
) -> tuple[Tensor, Memory]:
    table, outputs = memory.map(layout.table), []
    for step in run:
        rows = table.map(partial(layout.rows_at, step))
        z, rows = mini_batch(steps, step, rows, loss_gradient)
        parts = zip(table, rows, strict=True)
        table = Memory(*(tuple(map(partial(layout.write_at, step), *maps)) for maps in parts))
        outputs.append(z)
    return torch.stack(outputs), table.map(layout.states)
