"""The registered operator of SwiGLU: Triton kernels.

The plain form is in `deltarule.nn.mlp`, which chooses between the two, and which has the products
around it.
"""

from typing import NamedTuple

from torch import Tensor

from deltarule.ops.fused_kernels import kernel_operator
from deltarule.ops.registration import Rules


class GatedProduct(NamedTuple):
    """h = SiLU(gate) * up, contiguous.

    gate: [..., D].
    up: Like gate.
    """

    gate: Tensor
    up: Tensor


swiglu = kernel_operator(
    "swiglu", GatedProduct, "fused.swiglu_triton", lambda x: (x.gate.new_empty(x.gate.shape),),
    Rules(gradients=("gate", "up")),
)  # fmt: skip
