"""The registered operators of the gates: Triton kernels.

The plain forms are in `deltarule.nn.gates`, which chooses between the two.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.operators import Operator
from deltarule.ops.registration import Gradients, Rules


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


def decay_forward(inputs: LogDecay) -> tuple[Tensor, Tensor]:
    """One kernel for log_decay and dt."""
    from deltarule.ops.fused import gates_triton as kernels

    log_decay, dt = kernels.log_decay(inputs)
    return log_decay, log_decay.new_empty(0) if dt is None else dt


def decay_backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: LogDecay
) -> Gradients:
    from deltarule.ops.fused import gates_triton as kernels

    d_log_decay, d_dt = gradients
    return kernels.log_decay_backward(d_log_decay, d_dt, inputs)


def decay_fake(inputs: LogDecay) -> tuple[Tensor, Tensor]:
    logits, shape = inputs.logits, inputs.logits.shape
    out = logits.new_empty(shape, dtype=torch.float32)
    return out, logits.new_empty(shape if inputs.step else (0,), dtype=torch.float32)


class WriteStrength(NamedTuple):
    """beta = beta_max * sigmoid(logits), in float32.

    logits: [..., HV].
    beta_max: Largest write strength.
    """

    logits: Tensor
    beta_max: float


def strength_forward(inputs: WriteStrength) -> tuple[Tensor, ...]:
    from deltarule.ops.fused import gates_triton as kernels

    return kernels.write_strength(inputs, None)


def strength_backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: WriteStrength
) -> Gradients:
    from deltarule.ops.fused import gates_triton as kernels

    return kernels.write_strength(inputs, gradients[0])


def strength_fake(inputs: WriteStrength) -> tuple[Tensor]:
    return (inputs.logits.new_empty(inputs.logits.shape, dtype=torch.float32),)


of_decay = LogDecay, decay_forward, decay_backward, decay_fake
rules = Rules(2, gradients=("logits", "A_log", "dt_bias"))
log_decay = Operator("log_decay", *of_decay, returned=2, rules=rules)
of_strength = WriteStrength, strength_forward, strength_backward, strength_fake
write_strength = Operator("write_strength", *of_strength, rules=Rules(gradients=("logits",)))
