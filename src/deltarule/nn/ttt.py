"""Test-time training: the state is a network, each mini-batch of tokens a step of its training."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.gates import computed, float32_parameter
from deltarule.nn.memory_mixer import MemoryMixer
from deltarule.nn.norm import ACTIVATIONS
from deltarule.nn.rotation import rotate
from deltarule.nn.rule import Arguments, LayerCall, System
from deltarule.shapes import TTTState

INNER_NORM_EPS = 1e-6
FIRST_WEIGHT = 0.02
# Channels inside the MLP, in multiples of a head's.
EXPANSION = 4


class TTTLinear(MemoryMixer):
    """TTT-Linear: W = W_0 - s sum_i eta_i grad |k_i + LN(W k_i) - v_i|^2 / 2, o = q + LN(W q).

    W_0 is the map (with a bias) before the mini-batch (of 16 tokens); that of a sequence's first is
    learned. eta = base_rate sigmoid(b_proj x) / head_k_dim, and s is 1 / place in the mini-batch
    plus a learned number, at least 0. Rotary positions count inside the mini-batch. The state holds
    W_0 as `recurrent`, the sum of the open mini-batch as `gradient`, and its tokens as `position`;
    so a sequence may stop and go on anywhere. head_k_dim is even, and values have the same size; a
    layer norm goes over all heads. An output gate is GELU(gate) * LN(o).
    """

    rule = System(
        name="ttt_linear", title="TTT-Linear", operator="ttt", decay="none", erase="gradient",
        page="ttt", state_size="2 HV K (K + 1)",
        recurrence="W = W_0 - s sum_i eta_i grad loss_i(W_0), i up to t in mini-batches of 16",
        read_out="o = q + LN(W q)",
        objective="|k + LN(W k) - v|^2 / 2",
        source="arXiv 2407.04620, sections 2.1 to 2.7",
        forms="recurrent, chunked, GPU kernel of the scan",
    )  # fmt: skip
    options = MemoryMixer.options - {"head_v_dim"}
    default_conv_size = 0
    even = ("head_k_dim",)
    gate_activation = "gelu"
    base_rate = 1.0
    parts = ("recurrent", "gradient")
    float32_parameters = ("step_offset",)
    roles = {"inner_norm_weight": "scale", "inner_norm_bias": "scale"}

    def build_gates(self) -> None:
        super().build_gates()
        self.b_proj = nn.Linear(self.hidden_size, self.num_heads)
        nn.init.normal_(self.b_proj.weight, std=0.02)
        nn.init.zeros_(self.b_proj.bias)
        self.step_offset = float32_parameter(torch.zeros(self.mini_batch))
        self.inner_norm_weight = nn.Parameter(torch.ones(self.num_heads, self.head_v_dim))
        self.inner_norm_bias = nn.Parameter(torch.zeros(self.num_heads, self.head_v_dim))

    def build_norm(self) -> nn.Module:
        return nn.LayerNorm(self.num_heads * self.head_v_dim, eps=self.norm_eps)

    def normed(self, o: Tensor, gate: Tensor | None) -> Tensor:
        y: Tensor = self.o_norm(o.flatten(-2))
        return y if gate is None else y * ACTIVATIONS[self.gate_activation](gate.flatten(-2))

    def map_sizes(self) -> list[tuple[int, int]]:
        return [(self.head_k_dim, self.head_k_dim + 1)]

    def first_map(self, outputs: int, inputs: int) -> Tensor:
        first = FIRST_WEIGHT * torch.randn(self.num_heads, outputs, inputs)
        first[..., -1] = 0
        return first

    def step_scale(self) -> Tensor:
        """max(0, 1 / t + step_offset_t) for t = 1 .. mini_batch: a mean, to start with."""
        place = torch.arange(1, self.mini_batch + 1, device=self.step_offset.device)
        return (1 / place.to(self.step_offset.dtype) + self.step_offset).clamp(min=0)

    def read(self, call: LayerCall) -> Tensor:
        q, k, v = self.streams(call)
        position = call.before["position"]
        place = call.layout.positions(position) % self.mini_batch
        rate = self.base_rate / self.head_k_dim * torch.sigmoid(computed(self.b_proj(call.x)))
        norm: Arguments = {"norm_weight": self.inner_norm_weight, "norm_bias": self.inner_norm_bias}
        before = TTTState(self.held("recurrent", call), self.held("gradient", call), position)
        rest = {"norm_eps": INNER_NORM_EPS, "initial_state": before, **call.layout.ends}
        q, k = rotate(q, place), rotate(k, place)
        output = ops.ttt(q, k, v, beta=rate, step_scale=self.step_scale(), **norm, **rest)
        assert output.final_state is not None
        weights, gradients, call.after["position"] = output.final_state
        self.keep((weights, gradients), call)
        return output.o.to(v.dtype)


class TTTMLP(TTTLinear):
    """TTT-MLP: TTT-Linear whose network is x + LN(W_2 gelu(W_1 x)), 4 head_k_dim channels inside.

    The learning rate is a tenth of TTT-Linear's. The state has `recurrent_2` and `gradient_2` for
    the second map.
    """

    rule = replace(
        TTTLinear.rule, name="ttt_mlp", title="TTT-MLP",
        state_size="2 HV (4K (K + 1) + K (4K + 1))",
        recurrence="W = W_0 - s sum_i eta_i grad loss_i(W_0) for both maps of the MLP",
        read_out="o = q + LN(W_2 gelu(W_1 q))",
        objective="|k + LN(W_2 gelu(W_1 k)) - v|^2 / 2",
    )  # fmt: skip
    base_rate = 0.1

    def map_sizes(self) -> list[tuple[int, int]]:
        inner = EXPANSION * self.head_k_dim
        return [(inner, self.head_k_dim + 1), (self.head_k_dim, inner + 1)]
