"""Titans' memory as context: attention over what the memory held before a segment, and over it.

h = M'(x), y = Attention(p | h | x) within a segment, o = y^ * sigmoid(m^), m = M(y)

p are learned tokens, M writes each token and reads it, M' reads the memory before the segment, and
^ is a norm.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.call import LayerCall
from deltarule.nn.gates import unit
from deltarule.nn.layout import split
from deltarule.nn.state import State
from deltarule.nn.titans_blocks import TitansMAG


class TitansMAC(TitansMAG):
    """Titans, memory as context: what the memory holds is read by each segment, before it writes.

    In segments of `window` tokens, y = Attention(p | h | x) with h = M'(x) of the memory before the
    segment, and o = norm(y) * sigmoid(norm(M(y))). A token sees the h and x of its segment up to
    its own, and reads the memory after its own y: in print both are of the whole segment, later
    tokens included. h is read without the memory's convolution. The state has the memory before
    the open segment as `segment` and `segment_2`, and the `keys` and `values` of its tokens.

    Defaults: as `TitansMAG`; segments of 128.

    Examples:
        >>> y, state = TitansMAC(32, num_heads=2, window=8)(torch.zeros(1, 5, 32))
        >>> state["keys"].shape, state["length"]
        (torch.Size([1, 8, 64]), tensor([5]))
    """

    rule = replace(
        TitansMAG.rule, name="titans_mac", title="Titans, memory as context",
        state_size="5 HV 2K (K + V) + 2 W HV (K + V)",
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
        slot = torch.arange(self.window, device=call.x.device).unsqueeze(0)
        if layout.tokens == 1:
            slot = place.unsqueeze(1)
            y, state = self.mix_segment(call.x, slot, layout.counts.unsqueeze(1) > 0, state)
            call.after.update(state)
            return y
        segments = (layout.tokens + 2 * self.window - 2) // self.window
        token = torch.arange(segments * self.window, device=call.x.device) - place.unsqueeze(1)
        real = (token >= 0) & (token < layout.counts.unsqueeze(1))
        token = token.clamp(0, layout.tokens - 1).unsqueeze(-1)
        x = torch.take_along_dim(call.x, token, dim=1).masked_fill(~real.unsqueeze(-1), 0)
        outputs = []
        for part, here in zip(x.split(self.window, 1), real.split(self.window, 1), strict=True):
            y, state = self.mix_segment(part, slot, here, state)
            outputs.append(y)
        call.after.update(state)
        index = place.unsqueeze(1) + torch.arange(layout.tokens, device=call.x.device)
        return torch.take_along_dim(torch.cat(outputs, dim=1), index.unsqueeze(-1), dim=1)

    def mix_segment(
        self, x: Tensor, slot: Tensor, real: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """[N, L, D] of tokens at the slots [N or 1, L] of a segment: all of it, or one of each."""
        y = self.attend_segment(x, slot, real, state)
        before = State({name: state[name] for name in self.memory.init_state(0)})
        m, after = self.memory(y, before, mask=real)
        # A sequence that filled its segment begins the next with the memory as it is now.
        full = real[:, -1] & (slot[:, -1] == self.window - 1)
        names = zip(self.memory.names("segment"), self.memory.names("recurrent"), strict=True)
        begun = {
            own: torch.where(full.view(-1, 1, 1, 1), after[of], state[own]) for own, of in names
        }
        return self.gated(y, m), State(state, **after, **begun)

    def attend_segment(self, x: Tensor, slot: Tensor, real: Tensor, state: State) -> Tensor:
        """Attention over p, h and the segment so far; state's keys and values are replaced."""
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
        seen = (slots <= slot.unsqueeze(-1)).repeat(1, 1, 2)
        return self.o_proj(self.softmax(q, rows["k"], rows["v"], seen).flatten(-2))

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
