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

    return kernels.gated_norm(inputs)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: GatedNorm
) -> Gradients:
    from deltarule.ops.fused import norms_triton as kernels

    assert gradients[0] is not None
    return kernels.gated_norm_backward(gradients[0], inputs)


def fake(inputs: GatedNorm) -> tuple[Tensor]:
    return (inputs.x.new_empty(inputs.x.shape),)


rules = Rules(gradients=("x", "gate", "weight"))
gated_norm = Operator("gated_norm", GatedNorm, forward, backward, fake, rules=rules)
