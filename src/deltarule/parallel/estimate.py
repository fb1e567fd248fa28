"""Seconds and bytes of a training step on so many GPUs, for every way to divide the work.

    step = accumulate * (compute + waits for weights, heads and states) + replicas + update

What is measured and what is assumed stands in `machine`. Left out: pipelines, stragglers, input,
checkpoints, the imbalance of packed rows, and how collectives and compute slow each other down.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from deltarule.parallel import machine as measured
from deltarule.parallel.machine import Machine, Size

# What PyTorch, NCCL and the allocator take beside tensors, bytes.
OVERHEAD = 6e9
# Share of the memory that may be planned with.
USABLE = 0.92
# Rows times heads below which the kernels split rows.
FEW_ROWS = 66


@dataclass(frozen=True)
class Division:
    """How the GPUs are divided along the axes of `World`, and what a group of them takes at once.

    With `checkpointing` blocks are computed again; `rows` is what one context takes at once.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    checkpointing: bool = False
    rows: int = 1

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    def __str__(self) -> str:
        """Only what is more than one."""
        names = "replicate", "shard", "context", "tensor"
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return " x ".join(parts or ["one GPU"]) + (", recompute" if self.checkpointing else "")


class Estimate(NamedTuple):
    """Seconds of an optimizer step by what takes them, and bytes of a GPU."""

    division: Division
    parts: dict[str, float]
    accumulate: float
    memory: float
    tokens: float
    flops: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def utilisation(self) -> float:
        """Share of the matrix units' peak that does what a step needs at the least."""
        return self.flops / self.seconds / self.division.gpus / measured.PEAK_FLOPS

    @property
    def binds(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def estimate(
    size: Size, machine: Machine, division: Division, length: int, batch_tokens: float
) -> Estimate | None:
    """Estimate a step of so many tokens in rows of a length; None where it does not fit."""
    d = division
    tokens = d.rows * length / d.context
    accumulate = batch_tokens / (d.replicate * d.shard * d.rows * length)
    used = memory(size, d, tokens)
    if used > USABLE * machine.memory or accumulate < 1:
        return None
    gathered = 2 * size.parameters / d.tensor
    if d.shard * d.context > 1 and used + gathered <= USABLE * machine.memory:
        used += gathered
    compute = compute_parts(size, machine, d, length, tokens)
    # All-reduces of the stream, in bfloat16 forward and in float32 backward, two in each.
    stream, forward = 2 * tokens * size.hidden, 4 if d.checkpointing else 2
    reduced = forward * machine.collective(stream, d.tensor)
    heads = 2 * size.layers * (reduced + 2 * machine.collective(2 * stream, d.tensor))
    beside = (sum(compute.values()) + heads) / size.layers
    parts = {name: accumulate * seconds for name, seconds in compute.items()}
    parts["heads"] = accumulate * heads
    parts["states"] = accumulate * size.recurrent * states(size, machine, d)
    parts["weights"] = accumulate * weights(size, machine, d, beside)
    parts["replicas"] = replicas(size, machine, d, beside)
    held = size.parameters / d.tensor / (d.shard * d.context)
    parts["update"] = measured.OPTIMIZER_S * held / machine.bandwidth
    flops = 6 * size.parameters + 7 * length * size.heads * 128 * size.attention
    return Estimate(d, parts, accumulate, used, batch_tokens, flops * batch_tokens)


def compute_parts(
    size: Size, machine: Machine, d: Division, length: int, tokens: float
) -> dict[str, float]:
    """Seconds of one pass forward and backward over the tokens of a GPU."""
    again = 4 / 3 if d.checkpointing else 1.0
    channels = tokens * size.heads / d.tensor
    # Weights and their gradients: 6 FLOP a parameter and token.
    block = size.layers * size.layer_parameters * again + size.vocabulary * size.hidden
    split = measured.SPLIT_PRODUCTS - (measured.SPLIT_PRODUCTS - 1) / d.tensor
    operator = measured.OPERATOR_S * (
        measured.LONG_ROWS if d.rows * size.heads / d.tensor < FEW_ROWS else 1
    )
    if d.context > 1:
        operator += measured.TRANSITION_S
    softmax = 7 * length * channels * 128 / (measured.ATTENTION_FLOPS * machine.matrix)
    # Heads split little of it: norms, casts and sums are of the whole stream.
    rest = measured.REST_S * tokens * size.hidden / machine.bandwidth
    rate = measured.MATRIX_FLOPS * machine.matrix
    # How fast kernels run that partly wait for memory, against an H200.
    speed = 0.3 + 0.7 * machine.bandwidth
    return {
        "products": 6 * block * tokens / d.tensor * split / rate,
        "operator": size.recurrent * operator * channels * again / speed,
        "attention": size.attention * softmax * again,
        "elementwise": size.layers * rest * again,
    }


def memory(size: Size, d: Division, tokens: float) -> float:
    """Bytes of a GPU: weights and moments in float32, gathered layers, what is kept, logits."""
    held = 16 * size.parameters / d.tensor / (d.shard * d.context)
    gathered = 0.0
    if d.shard * d.context > 1:
        gathered = (6 * size.layer_parameters + 4 * size.vocabulary * size.hidden) / d.tensor
    # Heads split the inside of a block, not the stream between blocks.
    kept = measured.KEPT_BYTES + (measured.CONTEXT_BYTES if d.context > 1 else 0)
    inside = (1 if d.checkpointing else size.layers) * kept * (0.3 + 0.7 / d.tensor)
    between = 2 * size.layers if d.checkpointing else 0
    logits = 6 * tokens * size.vocabulary / d.tensor
    return held + gathered + tokens * size.hidden * (inside + between) + logits + OVERHEAD


def room_to_keep(
    size: Size, parameters: float, d: Division, tokens: float, total: float, each: int
) -> bool:
    """Whether gathered weights, of `each` bytes, have room beside a pass over so many tokens."""
    more = 16 * (parameters - size.parameters) / (d.shard * d.context)
    needed = memory(size, d, tokens) + (more + each * parameters) / d.tensor
    return needed <= USABLE * total


def states(size: Size, machine: Machine, d: Division) -> float:
    """Seconds that a recurrent layer waits for states: U and M forward, dS back, and halos."""
    if d.context == 1:
        return 0.0
    one = size.heads / d.tensor * 128 * 128 * 4
    gather = sum(
        machine.collective(x * d.context, d.context, d.tensor) for x in (2 * one, one)
    ) + 2 * d.context * 6e-6  # fmt: skip
    far = [d.tensor * 2**i for i in range(math.ceil(math.log2(d.context)))] + [d.tensor]
    scan = sum(machine.message(x, distance) for distance in far for x in (2 * one, one))
    halo = 2 * machine.message(9 * size.heads / d.tensor * 128 * 2, d.tensor)
    return min(gather, scan) + halo


def weights(size: Size, machine: Machine, d: Division, beside: float) -> float:
    """Seconds that computing waits for sharded weights, which travel beside it layer by layer."""
    ways = d.shard * d.context
    if ways == 1:
        return 0.0
    layer = size.layer_parameters / d.tensor
    gather = machine.collective(2 * layer, ways, d.tensor)
    travel = 2 * gather + machine.collective(4 * layer, ways, d.tensor)
    copies = measured.SHARDING_S * layer / machine.bandwidth
    return size.layers * (copies + max(0.0, travel - 0.9 * beside)) + travel


def replicas(size: Size, machine: Machine, d: Division, beside: float) -> float:
    """Seconds that a step waits for the gradients of other copies."""
    ways = d.shard * d.context
    part = 4 * size.layer_parameters / d.tensor / ways
    each = 2 * machine.collective(part, d.replicate, ways * d.tensor)
    return size.layers * max(0.0, each - 0.3 * beside) + each


def best(
    size: Size, machine: Machine, gpus: int, length: int, batch_tokens: float
) -> list[Estimate]:
    """Estimates of all divisions that fit of a power of 2 of GPUs, the fastest first."""
    if gpus < 1 or gpus & (gpus - 1):
        raise ValueError(f"--gpus must be a power of 2, got {gpus}")
    powers = [2**i for i in range(gpus.bit_length())]
    near = [tensor for tensor in powers if tensor <= machine.host]
    choices = itertools.product(near, powers, powers, (1, 2, 4, 8, 16), (False, True))
    divisions = [
        Division(gpus // (tensor * context * shard), shard, context, tensor, again, rows)
        for tensor, context, shard, rows, again in choices
        if tensor * context * shard <= gpus
        and length // context >= 256
        and (rows == 1 or rows * length / context <= 65536)
    ]
    found = [estimate(size, machine, one, length, batch_tokens) for one in divisions]
    return sorted((e for e in found if e is not None), key=lambda e: e.seconds)
