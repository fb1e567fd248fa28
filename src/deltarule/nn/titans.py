"""Titans' neural memory: gradient steps with momentum, and weight decay that forgets."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.gates import computed, float32_parameter, unit
from deltarule.nn.memory_mixer import MemoryMixer
from deltarule.nn.rule import Arguments, LayerCall, System
from deltarule.nn.state import State
from deltarule.shapes import TitansState

# So large that at first a memory keeps about 1 - 1 / 1100 of itself with each token: the gradients
# of an MLP vanish with its weights, and a memory that has decayed to zero stays there.
FIRST_DECAY_BIAS = 7.0
# Channels inside the MLP, in multiples of a key's.
EXPANSION = 2
# What a value's norm may be to an MLP. Where both maps have grown to fit values of norm c, the loss
# curves by 4 c along a gradient; 16 equal keys then step 16 * 4 c / 320 = c / 5 of the way.
LARGEST_VALUE = 4.0


class TitansLinear(MemoryMixer):
    """Titans with a linear memory: S = eta S - theta grad |M k - v|^2, M = a M + S, o = M q.

    Unit q and k. The gradients of a mini-batch of tokens are taken at the memory before them, and
    the memory before a sequence's first token is learned. eta = sigmoid(m_proj x); theta =
    (1 - eta) sigmoid(b_proj x) / (2 mini_batch), with which equal keys do not overshoot, however
    long the momentum lasts; a = sigmoid(a_proj x + decay_bias), from sigmoid(7). These ranges are
    ours: the authors published no code. The state holds M as `recurrent`, S as `momentum`, the
    memory before the open mini-batch as `anchor`, and its tokens as `position`.
    """

    rule = System(
        name="titans_linear", title="Titans, linear memory", operator="titans", decay="head",
        erase="gradient", page="titans", state_size="3 HV V K",
        recurrence="S = eta S - theta 2 (M_0 k - v) k^T, M = a M + S, M_0 from mini-batches of 16",
        read_out="o = M q",
        objective="|M k - v|^2, with momentum and weight decay",
        source="arXiv 2501.00663, eq. 8 to 15",
        forms="recurrent, chunked, GPU kernel of the scan",
    )  # fmt: skip
    default_output_gate = True
    # Share of the largest rate with which mini-batches of equal keys do not overshoot.
    share_of_rate = 1.0
    parts = ("recurrent", "momentum", "anchor")
    float32_parameters = ("decay_bias",)
    roles = {"m_proj": "gate"}

    def build_gates(self) -> None:
        super().build_gates()
        self.a_proj, self.b_proj, self.m_proj = (
            nn.Linear(self.hidden_size, self.num_heads, bias=False) for _ in range(3)
        )
        nn.init.zeros_(self.a_proj.weight)
        self.decay_bias = float32_parameter(torch.full((self.num_heads,), FIRST_DECAY_BIAS))

    def map_sizes(self) -> list[tuple[int, int]]:
        return [(self.head_v_dim, self.head_k_dim)]

    def first_map(self, outputs: int, inputs: int) -> Tensor:
        return torch.randn(self.num_heads, outputs, inputs) * inputs**-0.5

    def init_state(self, batch_size: int) -> State:
        state = super().init_state(batch_size)
        for name, anchor in zip(self.names("recurrent"), self.names("anchor"), strict=True):
            state[anchor] = state[name].clone()
        return state

    def bounded(self, v: Tensor) -> Tensor:
        """Values as the memory is trained on them: any size does for a linear one."""
        return v

    def read(self, call: LayerCall) -> Tensor:
        q, k, v = self.activated(*self.streams(call))
        v = self.bounded(v)
        a, b, m = (computed(proj(call.x)) for proj in (self.a_proj, self.b_proj, self.m_proj))
        q, k = (unit(x).to(v.dtype) for x in (q, k))
        weights, momentum, anchor = (self.held(part, call) for part in self.parts)
        before = TitansState(weights, momentum, anchor, call.before["position"])
        largest = self.share_of_rate / (2 * self.mini_batch)
        beta = largest * torch.sigmoid(-m) * torch.sigmoid(b)
        decay = F.logsigmoid(a + self.decay_bias)
        gates: Arguments = {"beta": beta, "momentum": torch.sigmoid(m), "log_decay": decay}
        rest = {"mini_batch": self.mini_batch, "initial_state": before, **call.layout.ends}
        output = ops.titans(q, k, v, **gates, **rest)
        assert output.final_state is not None
        *parts, call.after["position"] = output.final_state
        self.keep(tuple(parts), call)
        return output.o.to(v.dtype)


class TitansMLP(TitansLinear):
    """Titans with an MLP as memory, o = M_2 gelu(M_1 q), 2 head_k_dim channels inside.

    The gradient of each map grows with the other, and so with the values: the learning rate is a
    tenth of the linear memory's, and values of a norm above 4 are shortened to it. The state has
    `recurrent_2`, `momentum_2` and `anchor_2` for the second map.
    """

    rule = replace(
        TitansLinear.rule, name="titans_mlp", title="Titans, MLP memory",
        state_size="3 HV 2K (K + V)",
        recurrence="S = eta S - theta grad |M_0(k) - v|^2, M = a M + S for both maps of the MLP",
        read_out="o = M_2 gelu(M_1 q)",
        objective="|M_2 gelu(M_1 k) - v|^2, with momentum and weight decay",
    )  # fmt: skip
    share_of_rate = 0.1

    def bounded(self, v: Tensor) -> Tensor:
        size = computed(v).norm(dim=-1, keepdim=True)
        return v * (LARGEST_VALUE / size.clamp(min=LARGEST_VALUE)).to(v.dtype)

    def map_sizes(self) -> list[tuple[int, int]]:
        inner = EXPANSION * self.head_k_dim
        return [(inner, self.head_k_dim), (self.head_v_dim, inner)]
