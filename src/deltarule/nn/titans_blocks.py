"""Titans' blocks of a memory beside attention, before it, and as what it reads.

p are learned tokens before every document, M writes each token and reads it, M' reads the memory
before the segment. Packed documents are laid out as rows.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.checks import check_integer, check_state, default, positive
from deltarule.nn.gates import unit
from deltarule.nn.layout import Layout, by_token, in_rows, make_layout, split
from deltarule.nn.mixer import Mixer
from deltarule.nn.norm import RMSNorm
from deltarule.nn.rotation import rotate
from deltarule.nn.rule import LayerCall
from deltarule.nn.state import State
from deltarule.nn.titans import TitansMLP
from deltarule.ops.mini_batches import lay_out

WINDOW, PERSISTENT = 128, 4
# What the memory has as the layer has it.
SIZES = ("num_heads", "head_k_dim", "head_v_dim")
OPTIONS = ("conv_size", "conv_bias", "mini_batch", "norm_eps")


class TitansMAG(Mixer):
    """Titans, memory as gate: o = norm(y) * sigmoid(norm(m)), y of attention, m of the memory.

    Attention sees the last `window` tokens and the `num_persistent` learned ones, which have the
    first rotary positions; the memory is a `TitansMLP` layer, and reads the learned tokens before a
    document. The state holds the memory's state, the `keys` and `values` of the last window - 1
    tokens, and `length`, the number of tokens seen. Defaults of the memory are those of
    `TitansMLP`; a window of 128, 4 learned tokens.

    Examples:
        >>> y, state = TitansMAG(32, num_heads=2, window=8)(torch.zeros(1, 5, 32))
        >>> state["keys"].shape, state["length"]
        (torch.Size([1, 7, 32]), tensor([9]))
    """

    rule = replace(
        TitansMLP.rule, name="titans_mag", title="Titans, memory as gate", page="titans_blocks",
        state_size="3 HV 2K (K + V) + (W - 1) HV (K + V)",
        recurrence="y = Attention(p | x), M = M + x", read_out="o = norm(y) * sigmoid(norm(M(x)))",
        source="arXiv 2501.00663, section 4, eq. 26 to 28",
    )  # fmt: skip
    options = TitansMLP.options | {"window", "num_persistent", "rope_theta"}
    default_conv_size = TitansMLP.default_conv_size
    default_output_gate = TitansMLP.default_output_gate
    convolved = ()
    even = ("head_k_dim",)
    linear_state = False
    heads_alone = False
    float32_parameters = ("memory.decay_bias",)
    roles = {"persistent": "start"}
    # Whether the memory reads the learned tokens, and whether attention always sees them.
    remembers_start = True
    sees_start = True
    memory: TitansMLP

    def check_options(self) -> None:
        self.window = positive("window", default(self.window, WINDOW))
        persistent = default(self.num_persistent, PERSISTENT)
        self.num_persistent = check_integer("num_persistent", persistent, 0)

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
            flat = rows.flatten(-2)
            extended.append(layout.with_history(flat, call.before[name]))
            call.after[name] = layout.next_history(flat, call.before[name])
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
        before = seen - self.num_persistent * self.sees_start
        known = row + first[:, None] >= reach - before[:, None, None]
        visible = near & known.unsqueeze(2)
        o = self.softmax(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), visible.flatten(0, 1))
        o = o.unflatten(0, (-1, q.shape[1])).flatten(1, 2)[:, : x.shape[1]]
        return self.o_proj(o.flatten(-2))

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
    tokens of the memory's output, including the learned ones.
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


class TitansMAC(TitansMAG):
    """Titans, memory as context: each segment reads the memory before it writes.

    In segments of `window` tokens, y = Attention(p | h | x) with h = M'(x) of the memory before the
    segment, and o = norm(y) * sigmoid(norm(M(y))). A token sees the h and x of its segment up to
    its own, and reads the memory after its own y: in print both are of the whole segment, later
    tokens included. h is read without the memory's convolution. The state has the memory before
    the open segment as `segment` and `segment_2`, and the `keys` and `values` of its tokens.
    """

    rule = replace(
        TitansMAG.rule, name="titans_mac", title="Titans, memory as context",
        state_size="4 HV 2K (K + V) + 2 W HV (K + V)",
        recurrence="h = M'(x), y = Attention(p | h | x), M = M + y, M' = M after each segment",
        read_out="o = norm(y) * sigmoid(norm(M(y)))",
        source="arXiv 2501.00663, section 4, eq. 21 to 25",
    )  # fmt: skip
    remembers_start = False

    def kept_rows(self) -> int:
        return self.window

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {name: (rows, 2 * size) for name, (rows, size) in super().memories().items()}

    def exact(self) -> tuple[str, ...]:
        return *super().exact(), *self.memory.names("segment")

    def empty_state(self, batch_size: int) -> State:
        state = super().empty_state(batch_size)
        names = zip(self.memory.names("segment"), self.memory.names("recurrent"), strict=True)
        return State(state, **{own: state[of].clone() for own, of in names})

    def mix_rows(self, call: LayerCall) -> Tensor:
        layout, place = call.layout, call.before["length"] % self.window
        state = State(call.before, length=call.before["length"] + layout.counts)
        if layout.tokens == 0:
            call.after.update(state.clone())
            return call.x
        segments = lay_out(call.x, self.window, position=place, lengths=layout.counts)
        parts = segments.cut(call.x.unsqueeze(2)).squeeze(2)
        outputs = []
        for x, slot, real in zip(parts, segments.within, segments.real, strict=True):
            y, state = self.mix_segment(x, slot, real, state)
            outputs.append(y)
        call.after.update(state)
        return segments.join(torch.stack(outputs).unsqueeze(2)).squeeze(2)

    def mix_segment(
        self, x: Tensor, slot: Tensor, real: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """[N, L, D] of tokens at the slots [N, L] of a segment: all of it, or one of each."""
        slots = torch.arange(self.window, device=x.device)
        here = (real & (slots == slot)).unsqueeze(-1)
        at_h, at_x = (slot + self.num_persistent + shift for shift in (0, self.window))
        h, q, rows = self.recall(x, state), self.project("q", x, at_x), {}
        for key, name in (("keys", "k"), ("values", "v")):
            pair = self.project(name, h, at_h), self.project(name, x, at_x)
            new = torch.cat(pair, dim=-1).flatten(-2)
            # Other slots have earlier tokens of the segment, or what no token here sees.
            state[key] = torch.where(here, new, state[key].to(new.dtype))
            rows[name] = torch.cat(self.heads_of(state[key]).chunk(2, dim=-1), dim=1)
        # Attention over p, h and the segment so far.
        seen = (slots <= slot.unsqueeze(-1)).repeat(1, 1, 2)
        y = self.o_proj(self.softmax(q, rows["k"], rows["v"], seen).flatten(-2))
        before = State({name: state[name] for name in self.memory.init_state(0)})
        m, after = self.memory(y, before, mask=real)
        # A sequence that filled its segment begins the next with the memory as it is now.
        full = real[:, -1] & (slot[:, -1] == self.window - 1)
        names = zip(self.memory.names("segment"), self.memory.names("recurrent"), strict=True)
        begun = {
            own: torch.where(full.view(-1, 1, 1, 1), after[of], state[own]) for own, of in names
        }
        return self.gated(y, m), State(state, **after, **begun)

    def recall(self, x: Tensor, state: State) -> Tensor:
        """M'(x): the memory before the segment, read."""
        memory = self.memory
        sizes = memory.num_heads, memory.head_k_dim
        q = unit(F.silu(split(memory.q_proj(x), *sizes)))
        first, second = (state[name].to(q.dtype) for name in memory.names("segment"))
        inner = F.gelu(torch.einsum("nhik, nthk -> nthi", first, q), approximate="tanh")
        o = torch.einsum("nhvi, nthi -> nthv", second, inner).to(x.dtype)
        gate = None if memory.g_proj is None else split(memory.g_proj(x), *o.shape[2:])
        return memory.o_proj(memory.normed(o, gate))
