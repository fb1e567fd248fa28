"""MiniMax's Lightning Attention: a layer without functions to replace, so its forward is."""

from typing import Any

import torch
from torch import Tensor

from deltarule.hf.call import NOTE, padding_removed
from deltarule.hf.recurrence import Recurrence, turned


def lightning_attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(-slope) S_{t-1} + v_t k_t^T; the layer keeps its projections, norm and gate."""
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
    if past_key_values is not None:
        # A layer that has not run holds an empty list.
        kept = past_key_values.get_linear_cache(self.layer_idx)
        start = turned(kept) if isinstance(kept, Tensor) else None
    call = Recurrence(q, k, v, None, log_decay, scale=1.0)
    o, state = call.run(start, NOTE.cu_seqlens, past_key_values is not None)
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, turned(state))
    o = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(o.flatten(-2))
    return self.out_proj(o), turned(state)
