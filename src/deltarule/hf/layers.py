"""What layers of transformers call, the short convolution, and those whose forward is replaced.

MiniMax's calls no function that could be. The others make gates, and hand on logits in their place:
the operators make gates of those, in the kernel of a step or in one for a whole sequence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations.accelerate import force_accelerate_hooks

from deltarule.hf.hooks import NOTE, one_row, padding_removed
from deltarule.hf.recurrence import Recurrence, first_given, gated_delta_rule, turned
from deltarule.nn.layout import make_layout
from deltarule.nn.linears import linears
from deltarule.nn.short_conv import short_convolution
from deltarule.ops import BetaLogits, DecayLogits
from deltarule.ops.history import last_rows
from deltarule.ops.sequences import computed


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
    """Keep the last real inputs [B, D, W] for the hook after the layer, where there is padding.

    The layer may have put earlier inputs before the T tokens whose padding is known.
    """
    if (real := NOTE.real) is None:
        return
    taps, tokens = weight.shape[1], real.shape[1]
    places = torch.arange(1, tokens + 1, device=real.device) * real
    ends = places.amax(1) + hidden_states.shape[-1] - tokens
    x = hidden_states.mT
    NOTE.history = last_rows(x, x.new_zeros(len(x), taps, x.shape[2]), ends, None).mT


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
    fused = activation in ("silu", "swish")
    y, _ = short_convolution(x, weight, None, make_layout(x, offsets, None), fused, bias)
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


def lightning_attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(-slope) S_{t-1} + v_t k_t^T; the layer keeps its projections, norm and gate."""
    cache = past_key_values if cache is None else cache
    batch, tokens, _ = hidden_states.shape
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    qkv = qkv.view(batch, tokens, self.num_attention_heads, 3 * self.head_dim)
    q, k, v = qkv.split(self.head_dim, -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    log_decay = -self.slope_rate.flatten().to(wide)
    if NOTE.real is not None:
        (log_decay,) = padding_removed(NOTE.real, log_decay.expand(batch, tokens, -1))
        k, v = padding_removed(NOTE.real, k, v)
    start = None
    if cache is not None:
        # A layer that has not run holds an empty list.
        kept = cache.get_linear_cache(self.layer_idx)
        start = turned(kept) if isinstance(kept, Tensor) else None
    call = Recurrence(q, k, v, None, log_decay, scale=1.0)
    o, state = call.run(start, NOTE.cu_seqlens, cache is not None)
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, turned(state))
    o = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(o.flatten(-2))
    return self.out_proj(o), turned(state)


@force_accelerate_hooks("conv1d")  # type: ignore[untyped-decorator]
def gated_delta_layer(
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """Gated DeltaNet or KDA; the layer keeps its projections, and norm and gate of its output."""
    x, start, cache = hidden_states, None, cache_params if cache is None else cache
    if attention_mask is not None:
        x = (x * attention_mask.unsqueeze(-1)).to(x.dtype)
    if cache is not None:
        start = cache.get_recurrent_state(self.layer_idx, state_idx=0)
    qkv, gate, b, decay = projections(self, x)
    if hasattr(self, "forget_gate"):
        keys = values = self.qkv_dim, self.head_dim
    else:
        keys, values = (self.key_dim, self.head_k_dim), (self.value_dim, self.head_v_dim)
    channels, sizes = zip(keys, keys, values, strict=True)
    parts = zip(convolved(self, qkv, channels, cache, cu_seq_lens_q), sizes, strict=True)
    q, k, v = (part.unflatten(-1, (-1, size)) for part, size in parts)
    o, state = gated_delta_rule(
        q, k, v, decay, BetaLogits(b, 2.0 if getattr(self, "allow_neg_eigval", False) else 1.0),
        initial_state=start, output_final_state=cache is not None,
        use_qk_l2norm_in_kernel=True, cu_seq_lens_q=cu_seq_lens_q,
    )  # fmt: skip
    if cache is not None:
        cache.update_recurrent_state(state, self.layer_idx)
    qwen = hasattr(self, "norm")
    norm, out = (self.norm, self.out_proj) if qwen else (self.o_norm, self.o_proj)
    return out(norm(o.flatten(0, 2), gate.reshape(-1, sizes[2])).view(*x.shape[:2], -1))


def projections(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | DecayLogits]:
    """q, k and v in one row, the output's gate, the logits of beta, and the decay."""
    if hasattr(self, "in_proj_qkvz"):
        given = products(x, [self.in_proj_qkvz, self.in_proj_ba])
        *parts, gate, b, a = self.fix_query_key_value_ordering(*given)
        return torch.cat([part.flatten(2) for part in parts], -1), gate, b, head_decay(self, a)
    if hasattr(self, "in_proj_qkv"):
        modules = [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]
        qkv, gate, b, a = products(x, modules)
        return qkv, gate, b, head_decay(self, a)
    whole, kda = hasattr(self, "g_proj"), hasattr(self, "forget_gate")
    modules = [self.q_proj, self.k_proj, self.v_proj, self.b_proj]
    modules += [self.g_proj if whole else self.g_a_proj, *([] if kda else [self.a_proj])]
    q, k, v, b, gate, *a = products(x, modules)
    decay = self.forget_gate(x) if kda else head_decay(self, *a)
    return torch.cat([q, k, v], -1), gate if whole else self.g_b_proj(gate), b, decay


def products(x: Tensor, modules: list[Any]) -> Sequence[Tensor]:
    """One node of autograd; without gradients calls of modules take the host less time."""
    return linears(x, modules) if torch.is_grad_enabled() else [module(x) for module in modules]


def head_decay(self: Any, a: Tensor) -> DecayLogits:
    return DecayLogits(a, computed(self.A_log), computed(self.dt_bias))


def forget_gate(self: Any, x: Tensor) -> DecayLogits:
    """KDA's decay for each channel: a map of one matrix or two, and maybe a lower bound."""
    a = self.f_proj(x) if hasattr(self, "f_proj") else self.f_b_proj(self.f_a_proj(x))
    bound = self.lower_bound if getattr(self, "safe_gate", False) else None
    heads = self.num_heads, self.head_dim
    return DecayLogits(
        a.unflatten(-1, heads), computed(self.A_log).flatten(), computed(self.dt_bias).view(heads),
        getattr(self, "safe_gate_lower_bound", bound),
    )  # fmt: skip


def convolved(
    self: Any, qkv: Tensor, channels: Sequence[int], cache: Any, cu_seqlens: Tensor | None
) -> Sequence[Tensor]:
    """q, k and v [B, T, D] after the inputs in the cache, which move on.

    Each is whole in memory, as the operator takes it: parts of one would be copied for it.
    """
    weight, bias, activation = self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation
    x, layer, tokens = qkv.mT, self.layer_idx, qkv.shape[1]
    if cache is not None:
        before = cache.get_conv_state(layer, state_idx=0)
        if before is not None and tokens == 1 and not cache.is_recording_past(layer):
            y = causal_conv1d_step(x, before, weight, bias, activation)
            return y.mT.split(channels, -1)
        x = cache.update_conv_state(x, layer, conv_kernel_size=self.conv_kernel_size)
    note_history(x, weight)
    biases = [None] * 3 if bias is None else bias.split(channels)
    parts = zip(x.split(channels, 1), weight.split(channels), biases, strict=True)
    outputs = [convolution(*part, activation, cu_seqlens).mT for part in parts]
    # The gradient of a cut has another layout: none where all tokens stay.
    return outputs if cache is None else [y[:, -tokens:] for y in outputs]
