"""RG-LRU, the recurrence of Griffin and Hawk: each channel decays by a gated power of its own rate.

a_t = sigmoid(Lambda)^(8 r_t), r_t = sigmoid(W_a x_t + b_a), i_t = sigmoid(W_x x_t + b_x)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed, float32_parameter
from deltarule.nn.rule import LayerCall, System
from deltarule.nn.scan_mixer import VectorMixer

# What a gate of one raises the rate to.
POWER = 8.0
# a where the gate is one, at first.
FIRST_DECAYS = (0.9, 0.999)
# The least 1 - a^2: its root has no slope at zero.
SMALLEST = 1e-20


def within_heads(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[B, T, H, V] of x [B, T, H, V], each head by a matrix [H, V, V] of its own."""
    return (x.transpose(1, 2) @ weight.to(x.dtype)).transpose(1, 2) + bias


class RGLRU(VectorMixer):
    """The recurrent block of Griffin and Hawk: RG-LRU of a convolved branch, times GELU of another.

    h = a h + sqrt(1 - a^2) (i x), where x is the convolved `v_proj` of the input. Both gates read
    the channels of their own head. The first token of a document is written with amplitude 1, as in
    the authors' release; so the state counts tokens (`length` [N]). No activation follows the
    convolution; a starts from 0.9 to 0.999 where its gate is one.
    """

    rule = System(
        name="rg_lru", title="RG-LRU (Griffin, Hawk)", operator="selective_scan", decay="element",
        erase="none", state_size="HV V",
        recurrence="h = a * h + sqrt(1 - a^2) * (i * x)", read_out="o = h",
        source="arXiv 2402.19427, section 2.4, eq. 1 to 4",
    )  # fmt: skip
    default_conv_size = 4
    default_output_gate = True
    gate_activation = "gelu"
    counts = True
    float32_parameters = ("rate", "a_bias", "i_bias")
    roles = {"a_weight": "gate", "i_weight": "gate"}

    def activates(self, name: str) -> bool:
        return False

    def build_gates(self) -> None:
        sizes = self.num_heads, self.head_v_dim
        for name in ("a", "i"):
            weight = torch.randn(*sizes, self.head_v_dim) * self.head_v_dim**-0.5
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", float32_parameter(torch.zeros(sizes)))
        decay = torch.empty(sizes, dtype=torch.float32).uniform_(*FIRST_DECAYS)
        # The inverse of softplus at -log(a) / 8.
        self.rate = float32_parameter(torch.expm1(-decay.log() / POWER).log())

    def read(self, call: LayerCall) -> Tensor:
        x = self.by_head(self.stream("v", call))
        gate = torch.sigmoid(computed(within_heads(x, self.a_weight, self.a_bias)))
        # sigmoid(-rate) is the print's a.
        log_decay = -POWER * gate * F.softplus(self.rate)
        amplitude = (-torch.expm1(2 * log_decay)).clamp(min=SMALLEST).sqrt()
        first = (call.positions() == 0)[..., None, None]
        writes = torch.sigmoid(computed(within_heads(x, self.i_weight, self.i_bias))) * x
        h = self.run(torch.where(first, writes, amplitude * writes), log_decay, call)
        return h.to(x.dtype)
