"""The registered operators of the gates, and their backward operators: Triton kernels.

The plain forms are in `deltarule.nn.gates`, which chooses between the two.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.eager import no_second_derivative


@torch.library.custom_op("deltarule::log_decay", mutates_args=())
def log_decay(logits: Tensor, A_log: Tensor, dt_bias: Tensor, step: bool) -> tuple[Tensor, Tensor]:
    """dt = softplus(logits + dt_bias), log_decay = -exp(A_log) * dt.

    Args:
        logits: [B, T, HV] or [B, T, HV, K], any strides.
        A_log: [HV].
        dt_bias: [HV] or [HV, K].
        step: Whether dt is wanted too.

    Returns:
        log_decay in float32, and dt (empty unless wanted).
    """
    from deltarule.ops.fused import gates_triton as kernels

    out, dt = kernels.log_decay(as_rows(logits, dt_bias.ndim), A_log, dt_bias.flatten(), step)
    return out.view(logits.shape), dt.view(logits.shape if step else (0,))


@torch.library.custom_op("deltarule::log_decay_backward", mutates_args=())
def log_decay_backward(
    d_log_decay: Tensor | None,
    d_dt: Tensor | None,
    logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by logits, A_log and dt_bias."""
    from deltarule.ops.fused import gates_triton as kernels

    axes = dt_bias.ndim
    d_logits, d_A_log, d_dt_bias = kernels.log_decay_backward(
        None if d_log_decay is None else as_rows(d_log_decay, axes),
        None if d_dt is None else as_rows(d_dt, axes),
        as_rows(logits, axes), A_log, dt_bias.flatten(),
    )  # fmt: skip
    return d_logits.view(logits.shape), d_A_log, d_dt_bias.view(dt_bias.shape)


@torch.library.custom_op("deltarule::write_strength", mutates_args=())
def write_strength(logits: Tensor, beta_max: float) -> Tensor:
    """beta = beta_max * sigmoid(logits), [..., HV] in float32."""
    from deltarule.ops.fused import gates_triton as kernels

    return kernels.write_strength(as_rows(logits, 1), None, beta_max).view(logits.shape)


@torch.library.custom_op("deltarule::write_strength_backward", mutates_args=())
def write_strength_backward(d_beta: Tensor, logits: Tensor, beta_max: float) -> Tensor:
    """The gradient by logits."""
    from deltarule.ops.fused import gates_triton as kernels

    rows = as_rows(logits, 1), as_rows(d_beta, 1)
    return kernels.write_strength(*rows, beta_max).view(logits.shape)


def as_rows(x: Tensor, axes: int) -> Tensor:
    """[..., channels in the last axes] -> [M, C]: a view wherever those follow each other."""
    return x.reshape(-1, x.shape[-axes:].numel()) if x.numel() else x.new_empty(0, 1)


@log_decay.register_fake
def _log_decay_fake(
    logits: Tensor, A_log: Tensor, dt_bias: Tensor, step: bool
) -> tuple[Tensor, Tensor]:
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    return out, logits.new_empty(logits.shape if step else (0,), dtype=torch.float32)


@log_decay_backward.register_fake
def _log_decay_backward_fake(
    d_log_decay: Tensor | None, d_dt: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    d_logits, d_A_log, d_dt_bias = (x.new_empty(x.shape) for x in tensors)
    return d_logits, d_A_log, d_dt_bias


@write_strength.register_fake
def _write_strength_fake(logits: Tensor, beta_max: float) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@write_strength_backward.register_fake
def _write_strength_backward_fake(d_beta: Tensor, logits: Tensor, beta_max: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_log_decay(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, step = inputs
    if not step:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors)


def _log_decay_backward(ctx: Any, d_log_decay: Tensor | None, d_dt: Tensor | None) -> Any:
    if d_log_decay is None and d_dt is None:
        return (None,) * 4
    return *log_decay_backward(d_log_decay, d_dt, *ctx.saved_tensors), None


def _setup_write_strength(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.beta_max = inputs[1]


def _write_strength_backward(ctx: Any, d_beta: Tensor) -> tuple[Tensor, None]:
    return write_strength_backward(d_beta, *ctx.saved_tensors, ctx.beta_max), None


log_decay.register_autograd(_log_decay_backward, setup_context=_setup_log_decay)
write_strength.register_autograd(_write_strength_backward, setup_context=_setup_write_strength)
log_decay_backward.register_autograd(no_second_derivative)
write_strength_backward.register_autograd(no_second_derivative)
