"""The registered operators of the short convolution, of one stream and of three: Triton kernels.

The plain form is in `deltarule.nn.short_conv`, which chooses between the two.
"""

from itertools import chain
from typing import NamedTuple

from torch import Tensor

from deltarule.ops.fused_kernels import kernel_operator
from deltarule.ops.registration import Rules

# More taps would be unrolled into more registers than a program has.
MAX_TAPS = 8


class ShortConv(NamedTuple):
    """Convolve each channel over time, then SiLU.

    Gives y [B, T, D] in x's dtype, and the last inputs of each sequence [N, R, D].

    x: [B, T, D], any strides.
    weight: Taps [D, W], W from 1 to 8; the last weighs the token itself.
    history: [N, R, D] with R = W - 1, the inputs before each sequence, in x's dtype. None: zeros.
    cu_seqlens: Offsets [N + 1] of packed sequences. None: a row is a sequence.
    sequence: [T] which packed sequence each token belongs to. None without cu_seqlens.
    counts: [B] real tokens, at the front of each row. None: all are real.
    activated: Whether SiLU follows.
    """

    x: Tensor
    weight: Tensor
    history: Tensor | None
    cu_seqlens: Tensor | None
    sequence: Tensor | None
    counts: Tensor | None
    activated: bool

    @property
    def sequences(self) -> int:
        """N: rows, or packed sequences."""
        return self.x.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1


def fake(inputs: ShortConv) -> tuple[Tensor, Tensor]:
    x, reach = inputs.x, inputs.weight.shape[1] - 1
    return x.new_empty(x.shape), x.new_empty(inputs.sequences, reach, x.shape[2])


rules = Rules(2, gradients=("x", "weight", "history"))
short_conv = kernel_operator("short_conv", ShortConv, "fused.short_conv_triton", fake, rules, 2)


class ShortConvs(NamedTuple):
    """q, k and v, each convolved as by `ShortConv`: one call for the host, three for the GPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    q_history: Tensor | None
    k_history: Tensor | None
    v_history: Tensor | None
    cu_seqlens: Tensor | None
    sequence: Tensor | None
    counts: Tensor | None
    q_activated: bool
    k_activated: bool
    v_activated: bool

    @property
    def streams(self) -> list[ShortConv]:
        """Each on its own."""
        return [ShortConv._make((*self[i:9:3], *self[9:12], self[12 + i])) for i in range(3)]


rules = Rules(6, gradients=ShortConvs._fields[:9])
short_convs = kernel_operator(
    "short_convs", ShortConvs, "fused.short_conv_triton",
    lambda given: tuple(chain(*zip(*map(fake, given.streams), strict=True))), rules, 6,
)  # fmt: skip
