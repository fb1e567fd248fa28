"""Titans' blocks of a memory beside attention, and before it.

MAG:  y = Attention(p | x) over a window and p, o = y^ * sigmoid(m^), m = M(p | x)
MAL:  o = Attention(M(p | x)) over a window

p are learned tokens before every document, M writes each token and reads it, and ^ is a norm.
Packed documents are laid out as rows.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.call import LayerCall
from deltarule.nn.checks import check_even, check_state, default, positive
from deltarule.nn.layout import Layout, by_token, in_rows, make_layout, split
from deltarule.nn.mixer import Mixer
from deltarule.nn.norm import RMSNorm
from deltarule.nn.rotation import rotate
from deltarule.nn.state import State
from deltarule.nn.titans import TitansMLP

WINDOW, PERSISTENT = 128, 4
# What the memory has as the layer has it.
SIZES = ("num_heads", "head_k_dim", "head_v_dim")
OPTIONS = ("conv_size", "conv_bias", "mini_batch", "norm_eps")


class TitansMAG(Mixer):
    """Titans, memory as gate: o = norm(y) * sigmoid(norm(m)), y of attention, m of the memory.

    Attention sees the last `window` tokens and the `num_persistent` learned ones, with rotary
    positions, the first of which the learned ones have; the memory is a `TitansMLP` layer, and
    reads the learned tokens before a document. The state holds that of the memory, and the `keys`
    and `values` of the last window - 1 tokens, `length` tokens having been seen.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, a window of 128, 4 learned tokens;
    for the memory those of `TitansMLP`.

    Examples:
        >>> y, state = TitansMAG(32, num_heads=2, window=8)(torch.zeros(1, 5, 32))
        >>> state["keys"].shape, state["length"]
        (torch.Size([1, 7, 32]), tensor([9]))
    """

    rule = replace(
        TitansMLP.rule, name="titans_mag", title="Titans, memory as gate", page="titans_blocks",
        state_size="3 HV 2K (K + V) + W HV (K + V)",
        recurrence="y = Attention(p | x), M = M + x", read_out="o = norm(y) * sigmoid(norm(M(x)))",
        source="arXiv 2501.00663, section 4, eq. 26 to 28",
    )  # fmt: skip
    options = TitansMLP.options | {"window", "num_persistent", "rope_theta"}
    default_conv_size = TitansMLP.default_conv_size
    default_output_gate = TitansMLP.default_output_gate
    convolved = ()
    linear_state = False
    heads_alone = False
    float32_parameters = ("memory.decay_bias",)
    roles = {"persistent": "start"}
    # Whether the memory reads the learned tokens, and whether attention always sees them.
    remembers_start = True
    sees_start = True
    memory: TitansMLP

    def check_options(self) -> None:
        check_even("head_k_dim", self.head_k_dim)
        self.window = positive("window", default(self.window, WINDOW))
        self.num_persistent = default(self.num_persistent, PERSISTENT)
        if self.num_persistent != 0:
            positive("num_persistent", self.num_persistent)

    def build_output(self, gated: bool) -> None:
        given = {name: getattr(self, name) for name in SIZES + OPTIONS}
        self.memory = TitansMLP(self.hidden_size, output_gate=gated, **given)
        self.persistent = nn.Parameter(torch.randn(self.num_persistent, self.hidden_size))
        super().build_output(False)
        self.m_norm = self.build_norm()

    def build_norm(self) -> nn.Module:
        return RMSNorm(self.hidden_size, self.norm_eps)

    def kept_rows(self) -> int:
        return self.window - 1

    def memories(self) -> dict[str, tuple[int, ...]]:
        keys, values = (self.num_heads * n for n in (self.head_k_dim, self.head_v_dim))
        return {"keys": (self.kept_rows(), keys), "values": (self.kept_rows(), values)}

    def exact(self) -> tuple[str, ...]:
        return self.memory.exact()

    def empty_state(self, batch_size: int) -> State:
        """Nothing seen, not even the learned tokens."""
        own, like = super().init_state(batch_size), self.reference()
        rows = {name: x.to(like.dtype) for name, x in own.items()}
        length = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        return State(rows, **self.memory.init_state(batch_size), length=length)

    def init_state(self, batch_size: int) -> State:
        state = self.empty_state(batch_size)
        if batch_size == 0 or self.num_persistent == 0 or not self.remembers_start:
            return state
        alone = self.empty_state(1)
        x = self.persistent.to(alone["keys"].dtype).unsqueeze(0)
        call = LayerCall(x, make_layout(x, None, None), alone, State(), {})
        self.mix_rows(call)
        return State({name: x.expand(batch_size, *x.shape[1:]) for name, x in call.after.items()})

    def state_before(self, state: State | None, layout: Layout) -> State:
        if state is None:
            return self.init_state(layout.sequences)
        return check_state(state, self.empty_state(0), layout.sequences, self.exact())

    def mix(self, call: LayerCall) -> Tensor:
        rows = LayerCall(*in_rows(call.x, call.layout), call.before, call.after, call.shared)
        return by_token(self.mix_rows(rows), call.layout)

    def mix_rows(self, call: LayerCall) -> Tensor:
        """Mix call.x [N, L, D], a document a row; fill call.after."""
        y = self.attend(call.x, call)
        return self.gated(y, self.remember(call.x, call))

    def gated(self, y: Tensor, m: Tensor) -> Tensor:
        return self.o_norm(y) * torch.sigmoid(self.m_norm(m))

    def remember(self, x: Tensor, call: LayerCall) -> Tensor:
        """M(x): write each token, and read it."""
        before = State({name: call.before[name] for name in self.memory.init_state(0)})
        inner = LayerCall(x, call.layout, before, State(), {})
        y = self.memory.mix(inner)
        call.after.update(inner.after)
        return y

    def project(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """Queries, keys or values [N, L, H, K or V], the first two turned by their positions."""
        y = self.heads_of(getattr(self, f"{name}_proj")(x))
        return y if name == "v" else rotate(y, positions, self.rope_theta or 1.0)

    def heads_of(self, x: Tensor) -> Tensor:
        return split(x, self.num_heads, x.shape[-1] // self.num_heads)

    def start(self, like: Tensor) -> list[Tensor]:
        """Keys and values [1, P, H, K or V] of learned tokens, if attention always sees them."""
        x = self.persistent[: self.num_persistent * self.sees_start].to(like.dtype).unsqueeze(0)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return [self.project(name, x, positions) for name in "kv"]

    def attend(self, x: Tensor, call: LayerCall) -> Tensor:
        layout, seen = call.layout, call.before["length"]
        positions = call.positions()
        if x.shape[1] == 0:
            call.after.update({name: call.before[name].clone() for name in ("keys", "values")})
            return self.o_proj(self.project("v", x, positions).flatten(-2))
        q, k, v = (self.project(name, x, positions) for name in "qkv")
        reach, size = self.kept_rows(), min(self.window, x.shape[1])
        extended = []
        for name, rows in (("keys", k), ("values", v)):
            extended.append(layout.with_history(rows.flatten(-2), call.before[name]))
            call.after[name] = layout.next_history(extended[-1], reach)
        fill = -x.shape[1] % size
        q = F.pad(q, (0, 0, 0, 0, 0, fill)).unflatten(1, (-1, size))
        # [N, blocks, size + reach, H, K or V]
        k, v = (
            self.heads_of(F.pad(y, (0, 0, 0, fill)).unfold(1, size + reach, size).mT)
            for y in extended
        )
        row = torch.arange(size + reach, device=x.device)
        behind = torch.arange(reach, size + reach, device=x.device).unsqueeze(1) - row
        near = (behind >= 0) & (behind <= reach)
        first = torch.arange(q.shape[1], device=x.device) * size
        # Documents and learned tokens are not looked at beyond their beginning.
        known = row + first[:, None] >= reach - self.rows_before(seen)[:, None, None]
        visible = near & known.unsqueeze(2)
        o = self.softmax(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), visible.flatten(0, 1))
        o = o.unflatten(0, (-1, q.shape[1])).flatten(1, 2)[:, : x.shape[1]]
        return self.o_proj(o.flatten(-2))

    def rows_before(self, seen: Tensor) -> Tensor:
        """Earlier tokens whose keys are kept, without the learned ones."""
        return seen - self.num_persistent * self.sees_start

    def softmax(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """[M, L, H, V] of q [M, L, H, K] over what is always seen and the visible [M, L, rows]."""
        start = [y.expand(len(q), -1, -1, -1) for y in self.start(q)]
        k, v = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(start, (k, v), strict=True))
        visible = F.pad(visible, (k.shape[2] - visible.shape[-1], 0), value=True)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, visible.unsqueeze(1))
        return o.transpose(1, 2)


class TitansMAL(TitansMAG):
    """Titans, memory as layer: o = Attention(M(p | x)), the memory before attention.

    The learned tokens come before every document, for both; attention sees the last `window`
    tokens of what the memory puts out, the learned ones among them.

    Defaults: as `TitansMAG`.

    Examples:
        >>> y, state = TitansMAL(32, num_heads=2, window=8)(torch.zeros(1, 5, 32))
        >>> state["keys"].shape, state["length"]
        (torch.Size([1, 7, 32]), tensor([9]))
    """

    rule = replace(
        TitansMAG.rule, name="titans_mal", title="Titans, memory as layer",
        recurrence="M = M + x", read_out="o = Attention(M(x))",
        source="arXiv 2501.00663, section 4, eq. 29 to 31",
    )  # fmt: skip
    sees_start = False

    def build_norm(self) -> nn.Module:
        return nn.Identity()

    def mix_rows(self, call: LayerCall) -> Tensor:
        return self.attend(self.remember(call.x, call), call)
