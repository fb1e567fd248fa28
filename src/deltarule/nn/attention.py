"""Softmax attention with rotary positions, full or over a sliding window.

o_t = sum_s softmax_s(q_t . k_s / sqrt(D)) v_s        s <= t, and s > t - window
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nearest import check_known
from deltarule.nn import checks
from deltarule.nn import masked_attention as masked
from deltarule.nn.layout import Layout, make_layout, split
from deltarule.nn.linears import linear, linears
from deltarule.nn.mixer import Mixer
from deltarule.nn.norm import RMSNorm
from deltarule.nn.ring_attention import ring, rings
from deltarule.nn.rotation import rotate_first
from deltarule.nn.rule import LayerCall, System
from deltarule.nn.state import LentState, State
from deltarule.ops.context import Context
from deltarule.ops.context.rows import all_rows
from deltarule.shapes import Hidden

# Names in a model's config, where `attention_` tells them from those of recurrent layers.
OPTIONS = {
    "attention_head_dim": "head_dim", "attention_qk_norm": "qk_norm",
    "attention_gate": "output_gate", "attention_multiplier": "scale",
    "partial_rotary_factor": "partial_rotary_factor", "norm_eps": "norm_eps",
    "zero_centered_norm": "zero_centered_norm",
}  # fmt: skip


class Attention(Mixer):
    """Causal softmax attention through PyTorch's scaled_dot_product_attention.

    The state holds one row of keys and values for each token: `keys` and `values` [B, L, KV
    heads, D], rotated, newest last; `valid` [B, L] False where a row has no token; `length` [B].

    Args:
        hidden_size: Channels of x.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of num_heads. None: num_heads.
        head_dim: Channels D of a head, even. None: hidden_size / num_heads.
        window: Tokens that a token sees, itself included. None: the layer's default (here all).
        rope_theta: Base of the rotary wavelengths. None: no positions.
        partial_rotary_factor: Share of a head's channels that turn, the first ones, in [0, 1]; an
            even number of them. 0: no positions.
        qk_norm: A norm of q and k before they turn: "head", of each head's channels; "all", of
            all heads together. None: no norm.
        output_gate: Whether to multiply the output by sigmoid of a projection of x.
        scale: Factor of the scores. None: head_dim^-1/2.
        norm_eps: Added to the mean square in those norms.
        zero_centered_norm: Keep the weights of those norms less one.

    Raises:
        ValueError: A size is out of range.

    Examples:
        >>> y, state = Attention(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["keys"].shape
        torch.Size([1, 5, 2, 16])

    Source: arXiv 1706.03762, eq. 1; RoPE, arXiv 2104.09864; grouped heads, arXiv 2305.13245.
    """

    rule = System(
        name="attention", title="Softmax attention", operator="softmax", decay="none", erase="none",
        state_size="T H (K + V)",
        recurrence="(K, V) = ((K, k), (V, v))", read_out="o = V softmax(K^T q / sqrt(K))",
        objective="sum_j exp(q . k_j / sqrt(K)) |o - v_j|^2, exactly",
        source="arXiv 1706.03762, section 3.2 (the slides multiply by the mask; it must be added)",
        forms="cache, parallel, GPU kernel of PyTorch",
    )  # fmt: skip
    options = frozenset({"rope_theta"})
    default_window: ClassVar[int | None] = None

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        rope_theta: float | None = 10000.0,
        partial_rotary_factor: float = 1.0,
        qk_norm: Literal["head", "all"] | None = None,
        output_gate: bool = False,
        scale: float | None = None,
        norm_eps: float = 1e-5,
        zero_centered_norm: bool = False,
    ) -> None:
        # The options of recurrent layers mean nothing here.
        nn.Module.__init__(self)
        self.hidden_size = checks.positive("hidden_size", hidden_size)
        self.num_heads = checks.positive("num_heads", num_heads)
        self.num_kv_heads = checks.positive("num_kv_heads", checks.default(num_kv_heads, num_heads))
        checks.check_multiple("num_heads", num_heads, "num_kv_heads", self.num_kv_heads)
        if head_dim is None:
            checks.check_multiple("hidden_size", hidden_size, "num_heads", num_heads)
        head_dim = checks.default(head_dim, hidden_size // num_heads)
        self.head_dim = checks.positive("head_dim", head_dim)
        checks.check_share(partial_rotary_factor)
        turned = int(self.head_dim * partial_rotary_factor)
        self.rope_theta = rope_theta if turned else None
        self.turned, self.partial_rotary_factor = turned, partial_rotary_factor
        if self.rope_theta is not None:
            self.rope_theta = checks.above_zero("rope_theta", self.rope_theta)
            whole = turned == self.head_dim
            checks.check_even("head_dim" if whole else "partial_rotary_factor * head_dim", turned)
        window = checks.default(window, self.default_window)
        self.window = window if window is None else checks.positive("window", window)
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.g_proj = None
        if output_gate:
            self.g_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        if qk_norm is not None:
            check_known("qk_norm", qk_norm, ("head", "all"))
        flags = {"output_gate": output_gate, "zero_centered_norm": zero_centered_norm}
        checks.check_flags(flags)
        self.attention_qk_norm, self.zero_centered_norm = qk_norm, zero_centered_norm
        self.norm_eps = checks.above_zero("norm_eps", norm_eps)
        self.scale = checks.above_zero("scale", checks.default(scale, self.head_dim**-0.5))
        self.q_norm, self.k_norm = self._norm(num_heads), self._norm(self.num_kv_heads)

    def _norm(self, heads: int) -> RMSNorm | None:
        if self.attention_qk_norm is None:
            return None
        size = self.head_dim * (heads if self.attention_qk_norm == "all" else 1)
        return RMSNorm(size, self.norm_eps, self.zero_centered_norm)

    @classmethod
    def heads(cls, config: Any) -> dict[str, Any]:
        queries = checks.default(config.num_attention_heads, config.num_heads)
        numbers = {"num_heads": queries, "num_kv_heads": config.num_kv_heads}
        found = {own: getattr(config, n) for n, own in OPTIONS.items() if hasattr(config, n)}
        return numbers | found

    def init_state(self, batch_size: int) -> State:
        checks.check_integer("batch_size", batch_size, 0)
        like = self.reference()
        size = batch_size, 0, self.num_kv_heads, self.head_dim
        rows = torch.zeros(size, dtype=like.dtype, device=like.device)
        valid = torch.zeros(batch_size, 0, dtype=torch.bool, device=like.device)
        length = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        return State(keys=rows, values=rows.clone(), valid=valid, length=length)

    def lend(self, state: State, tokens: int) -> LentState:
        """Return a copy with free rows: for so many tokens, or with a window in a ring of its size.

        `place` [B] is the row of the next token, the same for all.
        """
        free = tokens if self.window is None else self.window - state["valid"].shape[1]
        length, rows = state["length"].clone(), {n: state[n] for n in ("keys", "values", "valid")}
        place = torch.full_like(length, rows["valid"].shape[1])
        for name, x in rows.items():
            rows[name] = torch.cat([x, x.new_zeros(len(x), free, *x.shape[2:])], 1)
        return LentState(rows, length=length, place=place)

    @property
    def appended(self) -> tuple[str, ...]:  # type: ignore[override]
        """Keys and values, which without a window are never overwritten."""
        return ("keys", "values") if self.window is None else ()

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {}

    def mix(self, call: LayerCall) -> Tensor:
        layout, before = call.layout, call.before
        if layout.context is not None:
            return self._over_context(call, layout.context)
        if isinstance(before, LentState) and "place" in before:
            call.after = before
            return self._decode(call.x, before)
        q, k, v = self._project(call.x, layout.positions(before["length"]))
        keys = torch.cat([before["keys"].to(k.dtype), k], dim=1)
        values = torch.cat([before["values"].to(v.dtype), v], dim=1)
        window = self.window
        if before["keys"].shape[1] == 0 and window is not None and layout.tokens > window:
            o = masked.attend_in_blocks(self._attend, q, keys, values, window, layout.sequence)
        elif (sight := masked.sight_of(before, layout, window)) is None:
            o = self._attend(q, keys, values, None)
        else:
            o = masked.attend_by_sight(self._attend, q, keys, values, sight, self.scale)
        if layout.cu_seqlens is None:
            call.after.update(masked.continued(before, keys, values, layout, self.window))
        return self._put_out(o, call.x)

    def _over_context(self, call: LayerCall, context: Context) -> Tensor:
        layout, before = call.layout, call.before
        q, k, v = self._project(call.x, layout.positions(before["length"]))
        if self.window is None and torch.is_grad_enabled() and rings(context, q, v):
            # No state: it would be the rows of all processes.
            return self._put_out(ring(context, q, self._keys(k), self._keys(v), self.scale), call.x)
        keys, values = (all_rows(context, rows)[:, : context.last] for rows in (k, v))
        lowest, visible = masked.visible_up_to(context, self.window, q.device)
        if visible is None:
            # PyTorch's kernels need no mask for it. It imports the whole compiler.
            from torch.nn.attention.bias import causal_lower_right

            visible = causal_lower_right(q.shape[1], keys.shape[1])
        o = self._attend(q, keys[:, lowest:], values[:, lowest:], visible)
        if context.offsets is None:
            call.after.update(masked.continued(before, keys, values, layout, self.window))
        return self._put_out(o, call.x)

    def weights(self, x: Hidden) -> Tensor:
        """Write out the softmax [B, num_heads, T, T] of tokens x with nothing before them.

        To look at: `forward` never forms it.
        """
        layout = make_layout(x, None, None)
        before = self.state_before(None, layout)
        q, k, _ = self._project(x, layout.positions(before["length"]))
        scores = torch.einsum("bihd, bjhd -> bhij", q, self._keys(k))
        scores = scores * self.scale
        tokens = x.shape[1]
        _, visible = masked.Sight(tokens, tokens, x.device, self.window).mask(0, tokens)
        return scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)

    def _keys(self, k: Tensor) -> Tensor:
        return k.repeat_interleave(self.num_heads // self.num_kv_heads, dim=2)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = linears(x, tuple(self.of_input().values()))
        if self.attention_qk_norm == "all" and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (split(y, y.shape[-1] // self.head_dim, self.head_dim) for y in (q, k, v))
        if self.attention_qk_norm == "head" and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            q, k = (rotate_first(y, self.turned, positions, self.rope_theta) for y in (q, k))
        return q, k, v

    def _put_out(self, o: Tensor, x: Tensor) -> Tensor:
        y = o.flatten(-2)
        if self.g_proj is not None:
            y = y * torch.sigmoid(linear(x, self.g_proj))
        return linear(y, self.o_proj)

    def _decode(self, x: Tensor, state: LentState) -> Tensor:
        """One token of each row, whose key and value take the next place of the cache."""
        if x.shape[1] != 1:
            raise ValueError(f"x must hold one token with a lent cache, got T = {x.shape[1]}")
        q, k, v = self._project(x, state["length"].unsqueeze(1))
        seen = masked.add_row(k[:, 0], v[:, 0], state)
        keys, values = (state[name].to(q.dtype) for name in ("keys", "values"))
        return self._put_out(self._attend(q, keys, values, seen[:, None, None]), x)

    def of_input(self) -> dict[str, nn.Module]:
        return {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Softmax attention over [B, T, heads, D]; visible None means plain causal."""
        heads = k.shape[2]
        if q.shape[1] == 1 and q.shape[2] > heads and type(visible) is Tensor:
            # The query heads that share a key head are rows of one query: no key is repeated.
            rows, k, v = q[:, 0].unflatten(1, (heads, -1)), k.transpose(1, 2), v.transpose(1, 2)
            o = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, scale=self.scale)
            return o.flatten(1, 2).unsqueeze(1)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible,
            is_causal=visible is None, scale=self.scale, enable_gqa=k.shape[2] != q.shape[2],
        )  # fmt: skip
        return o.transpose(1, 2)

    def state_before(self, state: State | None, layout: Layout) -> State:
        if isinstance(state, LentState) and "place" in state:
            return state
        over, packed = layout.context is not None, layout.cu_seqlens is not None
        if state is not None and (over or packed):
            given = "a context" if over else "cu_seqlens"
            raise ValueError(f"state must be None with {given}: attention then starts afresh")
        if packed or over:
            # Packed, one batch row, however many sequences; each counts from 0.
            length = layout.lengths(torch.zeros_like(layout.counts))
            return State(self.init_state(layout.sequences if over else 1), length=length)
        if state is None:
            return self.init_state(layout.sequences)
        keys = state.get("keys") if isinstance(state, dict) else None
        rows = keys.shape[1] if isinstance(keys, Tensor) and keys.ndim == 4 else 0
        # A state of a larger window, or of attention to all, holds tokens that these do not see.
        rows = rows if self.window is None else min(rows, self.window - 1)
        empty = self.init_state(0)
        for name in ("keys", "values", "valid"):
            empty[name] = empty[name].new_empty(0, rows, *empty[name].shape[2:])
        return checks.check_state(state, empty, layout.sequences)


class SlidingWindowAttention(Attention):
    """Attention to the last `window` tokens, with a state of at most that many rows.

    Defaults: a window of 2048 tokens, as in the hybrids of arXiv 2412.06464.

    Args:
        hidden_size: Channels of x.
        num_heads: Query heads.
        num_kv_heads, head_dim, rope_theta, partial_rotary_factor, qk_norm, output_gate, scale:
            As for `Attention`.
        window: Tokens that a token sees, itself included. None: 2048.
        norm_eps, zero_centered_norm: As for `Attention`.

    Examples:
        >>> layer = SlidingWindowAttention(32, num_heads=2, window=4)
        >>> y, state = layer(torch.zeros(1, 50, 32))
        >>> state["keys"].shape  # the token after them sees itself and three more
        torch.Size([1, 3, 2, 16])
    """

    rule = replace(
        Attention.rule, name="sliding_window", title="Sliding-window attention",
        state_size="(W - 1) H (K + V)",
        recurrence="(K, V) = the last W of ((K, k), (V, v))",
        source="arXiv 2004.05150, section 3.1; window and token counted together",
    )  # fmt: skip
    options = frozenset({"rope_theta", "window"})
    default_window = 2048
