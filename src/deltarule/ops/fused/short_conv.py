"""The registered operator of the short convolution, and its backward operator: Triton kernels.

The plain form is in `deltarule.nn.short_conv`, which chooses between the two.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.eager import no_second_derivative

# More taps would be unrolled into more registers than a program has.
MAX_TAPS = 8


@torch.library.custom_op("deltarule::short_conv", mutates_args=())
def short_conv(
    x: Tensor,
    weight: Tensor,
    history: Tensor,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
    counts: Tensor | None,
    activated: bool,
    head_size: int,
) -> tuple[Tensor, Tensor]:
    """Convolve each channel over time; then SiLU, then the unit norm of each head.

    Args:
        x: [B, T, D], any strides.
        weight: Taps [D, W], W from 1 to 8; the last weighs the token itself.
        history: [N, R, D] with R = W - 1, the inputs before each sequence, in x's dtype.
        cu_seqlens: Offsets [N + 1] of packed sequences. None: a row is a sequence.
        sequence: [T] which packed sequence each token belongs to. None without cu_seqlens.
        counts: [B] real tokens, at the front of each row. None: all are real.
        activated: Whether SiLU follows.
        head_size: Channels of a head whose outputs are divided by their length. 0: none.

    Returns:
        y [B, T, D] in x's dtype, and the last inputs of each sequence [N, R, D].
    """
    from deltarule.ops.fused import short_conv_triton as kernels

    return kernels.short_conv(
        x, weight, history, cu_seqlens, sequence, counts, activated, head_size
    )


@torch.library.custom_op("deltarule::short_conv_backward", mutates_args=())
def short_conv_backward(
    d_y: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    history: Tensor,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
    counts: Tensor | None,
    activated: bool,
    head_size: int,
    wants_history: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, weight and history; that by history is empty unless wanted."""
    from deltarule.ops.fused import short_conv_triton as kernels

    return kernels.short_conv_backward(
        d_y, d_final, x, weight, history, cu_seqlens, sequence, counts, activated, head_size,
        wants_history,
    )  # fmt: skip


@short_conv.register_fake
def _fake(x: Tensor, weight: Tensor, history: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), history.new_empty(history.shape)


@short_conv_backward.register_fake
def _backward_fake(
    d_y: Tensor, d_final: Tensor | None, x: Tensor, weight: Tensor, history: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = history.shape[0] if others[-1] else 0
    d_history = history.new_empty(sequences, *history.shape[1:])
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_history


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, d_y: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
    x, *others = ctx.saved_tensors
    if d_y is None and d_final is None:
        return (None,) * 8
    d_y = x.new_zeros(x.shape) if d_y is None else d_y
    wants_history = ctx.needs_input_grad[2]
    d_x, d_weight, d_history = short_conv_backward(
        d_y, d_final, x, *others, *ctx.options, wants_history
    )
    return d_x, d_weight, d_history if wants_history else None, *(None,) * 5


short_conv.register_autograd(_backward, setup_context=_setup_context)
short_conv_backward.register_autograd(no_second_derivative)
