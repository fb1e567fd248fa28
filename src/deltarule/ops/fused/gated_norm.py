"""The registered operator of the gated norm: Triton kernels.

The plain form is in `deltarule.nn.norm`, which chooses between the two.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from deltarule.ops.operators import Operator
from deltarule.ops.registration import Gradients, Rules

# A row is held whole in registers.
MAX_CHANNELS = 8192


class GatedNorm(NamedTuple):
    """y = weight * x / sqrt(mean(x^2) + eps) * activation(gate), contiguous and like x.

    x: [..., V], any strides.
    gate: Like x. None: no gate.
    weight: [V].
    eps: Added to the mean square.
    activation: "silu" or "sigmoid".
    """

    x: Tensor
    gate: Tensor | None
    weight: Tensor
    eps: float
    activation: str


def forward(inputs: GatedNorm) -> tuple[Tensor]:
    from deltarule.ops.fused import norms_triton as kernels

    x, gate, weight, eps, activation = inputs
    rows = None if gate is None else as_rows(gate)
    return (kernels.gated_norm(as_rows(x), rows, weight, eps, activation).view(x.shape),)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: GatedNorm
) -> Gradients:
    from deltarule.ops.fused import norms_triton as kernels

    (d_y,), (x, gate, weight, eps, activation) = gradients, inputs
    assert d_y is not None
    rows = None if gate is None else as_rows(gate)
    d_x, d_gate, d_weight = kernels.gated_norm_backward(
        as_rows(d_y), as_rows(x), rows, weight, eps, activation
    )
    return d_x.view(x.shape), None if d_gate is None else d_gate.view(x.shape), d_weight


def fake(inputs: GatedNorm) -> tuple[Tensor]:
    return (inputs.x.new_empty(inputs.x.shape),)


def as_rows(x: Tensor) -> Tensor:
    """[..., H, V] -> [M, H, V], [B, T, V] -> [M, 1, V]: a view wherever the leading axes allow."""
    return x.reshape(-1, x.shape[-2] if x.ndim > 3 else 1, x.shape[-1]) if x.numel() else (
        x.new_empty(0, 1, x.shape[-1])
    )  # fmt: skip


gated_norm = Operator(
    "gated_norm", GatedNorm, forward, backward, fake,
    rules=Rules(gradients=("x", "gate", "weight")),
)  # fmt: skip
