"""The short convolution of transformers' recurrent layers: channels before tokens, maybe a bias."""

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from deltarule.hf.call import NOTE, one_row
from deltarule.hf.recurrence import first_given
from deltarule.nn.layout import make_layout
from deltarule.nn.short_conv import convolution_from_zeros

SILU = ("silu", "swish")


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor:
    """[B, D, T] with taps [D, W] over a whole sequence; packed documents start afresh."""
    note_history(hidden_states, weight)
    return convolution(hidden_states, weight, bias, activation, cu_seq_lens_q)


def note_history(hidden_states: Tensor, weight: Tensor) -> None:
    """Keep the last real inputs for the hook after the layer, where there is padding."""
    if NOTE.real is not None:
        NOTE.history = last_inputs(hidden_states, weight.shape[1], NOTE.real)


def convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The same of some channels, which leaves no note."""
    x = hidden_states.transpose(1, 2)
    shape, offsets = x.shape, first_given(cu_seqlens, NOTE.cu_seqlens)
    x = x if offsets is None else one_row(x)
    # SiLU is part of the kernel.
    fused = activation in SILU
    y = convolution_from_zeros(x, weight, make_layout(x, offsets, None), fused, bias)
    y = y if fused else activated(y, activation)
    return y.reshape(shape).transpose(1, 2)


def causal_conv1d_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """[B, D, T] of one token or a few; the last inputs [B, D, W or more] move on in place."""
    kept, taps = conv_state.shape[-1], weight.shape[-1]
    inputs = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], -1)
    conv_state.copy_(inputs[..., -kept:])
    windows = inputs[..., 1 + kept - taps :].unfold(-1, taps, 1)
    # Not rounded before the sum.
    wide = torch.promote_types(weight.dtype, torch.float32)
    y = (windows * weight.unsqueeze(1).to(wide)).sum(-1)
    y = y if bias is None else y + bias.unsqueeze(-1)
    return activated(y, activation).to(hidden_states.dtype)


def activated(y: Tensor, activation: str | None) -> Tensor:
    """The named function of transformers, or none."""
    return y if activation is None else ACT2FN[activation](y)


def last_inputs(hidden_states: Tensor, taps: int, real: Tensor) -> Tensor:
    """[B, D, W] up to each row's last real token; zeros before the first one.

    The layer may have put earlier inputs before the T tokens that `real` [B, T] describes.
    """
    tokens = real.shape[1]
    places = torch.arange(1, tokens + 1, device=real.device) * real
    ends = places.amax(1) + hidden_states.shape[-1] - tokens
    padded = torch.nn.functional.pad(hidden_states, (taps, 0))
    rows = ends.unsqueeze(1) + torch.arange(taps, device=real.device)
    return padded.gather(2, rows.unsqueeze(1).expand(-1, hidden_states.shape[1], -1))
