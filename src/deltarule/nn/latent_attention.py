"""Attention whose keys and values all come from one small vector a token, which alone is kept.

c_t = norm(W_c x_t), r_t = W_r x_t        k_t = (U c_t, r_t), v_t = W c_t        of each head
o_t = sum_s softmax_s(q_t . k_s / sqrt(D)) v_s        q_t = (n_t, p_t)
    = W sum_s softmax_s((U^T n_t, p_t) . (c_s, r_s) / sqrt(D)) c_s        where few tokens read
"""

from typing import Any

import torch
from torch import Tensor, nn

from deltarule.nn.attention import Attention
from deltarule.nn.checks import above_zero, check_even, check_integer, default, positive
from deltarule.nn.layout import split
from deltarule.nn.linears import is_plain, linear
from deltarule.nn.norm import RMSNorm
from deltarule.nn.rotation import rotate
from deltarule.nn.state import State

# Added in the norm of c, whatever the other norms add.
EPS = 1e-6


class LatentAttention(Attention):
    """Multi-head latent attention, whose heads share what the state keeps of a token, c and r.

    c = norm(W_c x)        r = rotated(W_r x)        k = (U c, r) and v = U_v c of each head
    o_t = sum_s softmax_s(scale q_t . k_s) v_s

    Args:
        hidden_size: Channels of x.
        num_heads: Heads.
        kv_lora_rank: Channels of c.
        qk_nope_head_dim: Channels of a query or key that meet in U c.
        qk_rope_head_dim: Channels of r, the part of the key that all heads share; 0: none.
        v_head_dim: Channels of a value.
        rope_theta: Base of the rotary wavelengths of r. None: no positions.
        scale: Factor of the scores. None: (qk_nope_head_dim + qk_rope_head_dim)^-1/2.

    Raises:
        ValueError: A size is out of range.

    Examples:
        >>> layer = LatentAttention(32, num_heads=2, kv_lora_rank=8, qk_nope_head_dim=16,
        ...                         qk_rope_head_dim=4, v_head_dim=16)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> state["keys"].shape
        torch.Size([1, 5, 1, 12])

    Source: arXiv 2405.04434, section 2.1; without positions, arXiv 2510.26692, section 4.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope_theta: float | None = None,
        scale: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads, self.num_kv_heads = positive("num_heads", num_heads), 1
        self.latent = positive("kv_lora_rank", kv_lora_rank)
        rope = check_integer("qk_rope_head_dim", qk_rope_head_dim, 0)
        self.sizes = positive("qk_nope_head_dim", qk_nope_head_dim), rope
        self.v_head_dim = positive("v_head_dim", v_head_dim)
        # Channels of a row of the cache.
        self.head_dim = kv_lora_rank + qk_rope_head_dim
        self.window = self.attention_qk_norm = self.g_proj = None
        self.rope_theta = rope_theta if qk_rope_head_dim else None
        if self.rope_theta is not None:
            self.rope_theta = above_zero("rope_theta", self.rope_theta)
            check_even("qk_rope_head_dim", qk_rope_head_dim)
        self.scale = above_zero("scale", default(scale, sum(self.sizes) ** -0.5))
        self.q_proj = nn.Linear(hidden_size, num_heads * sum(self.sizes), bias=False)
        self.kv_a_proj = nn.Linear(hidden_size, self.head_dim, bias=False)
        self.kv_norm = RMSNorm(kv_lora_rank, EPS)
        self.kv_b_proj = nn.Linear(
            kv_lora_rank, num_heads * (self.sizes[0] + v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=False)

    @classmethod
    def heads(cls, config: Any) -> dict[str, Any]:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {name: getattr(config, name) for name in names} | {
            "num_heads": default(config.num_attention_heads, config.num_heads),
            "rope_theta": config.rope_theta if config.partial_rotary_factor else None,
            "scale": config.attention_multiplier,
        }

    def init_state(self, batch_size: int) -> State:
        state = super().init_state(batch_size)
        return State(state, values=state["keys"][..., :0])

    def of_input(self) -> dict[str, nn.Module]:
        return {"q": self.q_proj, "kv": self.kv_a_proj}

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of all heads, and c with r as one key head; there are no values beside them."""
        q = split(linear(x, self.q_proj), self.num_heads, sum(self.sizes))
        latent, shared = linear(x, self.kv_a_proj).split([self.latent, self.sizes[1]], dim=-1)
        shared = shared.unsqueeze(2)
        if self.rope_theta is not None:
            first, turned = q.split(self.sizes, dim=-1)
            q = torch.cat([first, rotate(turned, positions, self.rope_theta)], dim=-1)
            shared = rotate(shared, positions, self.rope_theta)
        k = torch.cat([self.kv_norm(latent).unsqueeze(2), shared], dim=-1)
        return q, k, k[..., :0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Form keys and values of all heads, or take queries and outputs through their maps."""
        nope, rope = self.sizes
        formed, more = nope + self.v_head_dim, 2 * self.latent - nope - self.v_head_dim
        if not is_plain(self.kv_b_proj) or q.shape[1] * more >= self.latent * formed:
            keys, values = self.expanded(k)
            return super()._attend(q, keys, values, visible)
        weight = split(self.kv_b_proj.weight.T, self.num_heads, formed)
        into, out = weight.to(q.dtype).split([nope, self.v_head_dim], dim=-1)
        first, shared = q.split([nope, rope], dim=-1)
        queries = torch.cat([torch.einsum("bthn, chn -> bthc", first, into), shared], dim=-1)
        o = super()._attend(queries, k, k[..., : self.latent], visible)
        return torch.einsum("bthc, chv -> bthv", o, out)

    def expanded(self, k: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared = k.split([self.latent, self.sizes[1]], dim=-1)
        sizes = self.sizes[0], self.v_head_dim
        both = split(linear(latent.squeeze(2), self.kv_b_proj), self.num_heads, sum(sizes))
        first, values = both.split(sizes, dim=-1)
        shared = shared.expand(*first.shape[:3], -1)
        return torch.cat([first, shared], dim=-1), values

    def _keys(self, k: Tensor) -> Tensor:
        return self.expanded(k)[0]
