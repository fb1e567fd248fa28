"""The registered operators of the gates: Triton kernels.

The plain forms are in `deltarule.nn.gates`, which chooses between the two.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.fused_kernels import kernel_operator
from deltarule.ops.registration import Rules


class LogDecay(NamedTuple):
    """log_decay = -exp(A_log) * dt in float32, and dt = softplus(logits + dt_bias).

    logits: [B, T, HV] or [B, T, HV, K], any strides.
    A_log: [HV].
    dt_bias: [HV] or [HV, K].
    step: Whether dt is wanted too; it is empty otherwise.
    """

    logits: Tensor
    A_log: Tensor
    dt_bias: Tensor
    step: bool


def decay_fake(inputs: LogDecay) -> tuple[Tensor, Tensor]:
    logits, shape = inputs.logits, inputs.logits.shape
    out = logits.new_empty(shape, dtype=torch.float32)
    return out, logits.new_empty(shape if inputs.step else (0,), dtype=torch.float32)


rules = Rules(2, gradients=("logits", "A_log", "dt_bias"))
log_decay = kernel_operator("log_decay", LogDecay, "fused.gates_triton", decay_fake, rules, 2)


class WriteStrength(NamedTuple):
    """beta = beta_max * sigmoid(logits), in float32.

    logits: [..., HV].
    beta_max: Largest write strength.
    """

    logits: Tensor
    beta_max: float


def strength_fake(inputs: WriteStrength) -> tuple[Tensor]:
    return (inputs.logits.new_empty(inputs.logits.shape, dtype=torch.float32),)


rules = Rules(gradients=("logits",))
write_strength = kernel_operator(
    "write_strength", WriteStrength, "fused.gates_triton", strength_fake, rules
)


class Gates(NamedTuple):
    """The `LogDecay` of a token, without its step, and the `WriteStrength`, in one call."""

    logits: Tensor
    A_log: Tensor
    dt_bias: Tensor
    beta_logits: Tensor
    beta_max: float

    @property
    def parts(self) -> tuple[LogDecay, WriteStrength]:
        return LogDecay(*self[:3], False), WriteStrength(*self[3:])


rules = Rules(2, gradients=Gates._fields[:4])
gates = kernel_operator(
    "gates", Gates, "fused.gates_triton",
    lambda given: (decay_fake(given.parts[0])[0], *strength_fake(given.parts[1])), rules, 2,
)  # fmt: skip
