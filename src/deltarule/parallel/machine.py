"""What a GPU computes and what its links carry: the numbers that an estimate starts from.

Rates are those of an H200, measured: a training step's products, the operator's kernels and the
rest, and what two of them lost by sharding, heads and a context, all fitted to one set of runs
(docs/figures/several_gpus_h200.json). Another GPU is told by how it compares, links by their
stated bandwidths.
"""

import math
from dataclasses import dataclass

# FLOP/s of the products of a training step, bfloat16, achieved.
MATRIX_FLOPS = 660e12
# How much slower products are when nearly all of each is on other GPUs: smaller, and less full.
SPLIT_PRODUCTS = 1.3
# Seconds a token and head of 128 x 128, gated delta rule, forward and backward; and how much longer
# where rows are few and long, so that the kernels split them.
OPERATOR_S, LONG_ROWS = 2.48e-9, 1.65
# The same for what a context adds: what the segments of a long row tell the other processes.
TRANSITION_S = 1.8e-9
# Seconds a token, layer and channel: norms, convolutions, SwiGLU, casts and the loss.
REST_S = 4.7e-11
# Seconds a parameter held: AdamW moves 26 bytes.
OPTIMIZER_S = 26e-12
# Seconds a parameter that gathering and reducing it copies, beside what travels.
SHARDING_S = 35e-12
# Bytes a token, layer and channel that are kept for the backward.
KEPT_BYTES = 32.1
# What a context keeps beside them.
CONTEXT_BYTES = 6.1
# FLOP/s of softmax attention, forward and backward (public figures of FlashAttention-3).
ATTENTION_FLOPS = 480e12
# Peak of the matrix units in bfloat16, for the share of it that is used.
PEAK_FLOPS = 989e12


@dataclass(frozen=True)
class Machine:
    """Hosts of GPUs and what connects them.

    `memory` is in bytes; the speed of matrix products and the bandwidth of memory are against an
    H200's.
    """

    name: str
    memory: float
    matrix: float
    bandwidth: float
    # Bytes/s a GPU in collectives inside a host, and between hosts: 400 Gbit/s a card, at 88 %.
    inside: float = 290e9
    outside: float = 44e9
    # GPUs of a host.
    host: int = 8
    latency_inside: float = 25e-6
    latency_outside: float = 45e-6
    latency_hop: float = 2.5e-6

    def collective(self, size: float, ways: int, stride: int = 1) -> float:
        """Seconds of an all-gather or reduce-scatter whose whole is so many bytes.

        It is over so many GPUs, every stride-th one. An all-reduce takes twice as long.
        """
        if ways == 1:
            return 0.0
        latency, bandwidth = self.latency_inside, self.inside
        if ways * stride > self.host:
            # Every member on a host brings its part in by its own card, NVLink does the rest.
            members = max(1, self.host // stride)
            latency, bandwidth = self.latency_outside, min(self.inside, members * self.outside)
        return size * (ways - 1) / ways / bandwidth + latency + self.latency_hop * min(ways, 512)

    def message(self, size: float, distance: int) -> float:
        """Seconds from one GPU to another that is so far away."""
        if distance < self.host:
            return size / self.inside + self.latency_inside
        return size / self.outside + self.latency_outside


MACHINES = {
    "h200": Machine("H200", 141e9, 1.0, 1.0),
    "h100": Machine("H100", 80e9, 1.0, 3.35 / 4.8),
    "a100": Machine("A100", 80e9, 312 / 989, 2.04 / 4.8, inside=235e9, outside=22e9),
}


@dataclass(frozen=True)
class Size:
    """A hybrid of gated delta rule and softmax attention, heads of 128 x 128.

    Embedding and head are two matrices; one layer in `every` is attention, with 0 none.
    """

    layers: int
    hidden: int
    vocabulary: int = 32_000
    every: int = 0
    kv_heads: int = 8

    @property
    def heads(self) -> int:
        return self.hidden // 128

    @property
    def attention(self) -> int:
        return self.layers // self.every if self.every else 0

    @property
    def recurrent(self) -> int:
        return self.layers - self.attention

    @property
    def layer_parameters(self) -> float:
        mlp = 3 * self.hidden * 16 * math.ceil(self.hidden * 8 / 3 / 16)
        recurrent = 5 * self.hidden**2 + mlp
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * 128 + mlp
        share = self.attention / self.layers
        return recurrent * (1 - share) + attention * share

    @property
    def parameters(self) -> float:
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden


def size_of(parameters: float, vocabulary: int = 32_000, every: int = 0) -> Size:
    """The size of so many parameters that is about a hundred channels wide for each layer."""
    if parameters < 1e7:
        raise ValueError(f"--parameters must be 1e7 or more, got {parameters:g}")
    # 13 hidden^2 a layer.
    hidden = 128 * max(2, round((parameters * 100 / 13) ** (1 / 3) / 128))
    layers = max(1, round((parameters - 2 * vocabulary * hidden) / (13 * hidden**2)))
    return Size(layers, hidden, vocabulary, every)
