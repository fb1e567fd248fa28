"""RWKV-7: decay each key channel, erase along one key and write along another.

S_t = S_{t-1} (Diag(w_t) - u_t (eta_t * u_t)^T) + v_t k'_t^T
w_t = exp(-e^(-1/2) sigmoid(decay_logits_t))        eta_t = sigmoid(erase_logits_t)
u_t = unit(k_t * erase_scale)        k'_t = k_t * (1 + (eta_t - 1) * replace_scale)
o_t = S_t q_t, normalised, + (q_t * k'_t * bonus summed over channels) v_t
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed, float32_parameter, low_rank
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule
from deltarule.nn.token_shift import ShiftedMixer, first_shares, shifted

# Where the first layer leaves its values for the layers after it.
FIRST_VALUES = "rwkv7_first_values"
# What each projection reads, and how fast its share of the token before falls with the channel.
SHIFT_POWERS = {"q": 0.2, "decay": 0.9, "k": 0.7, "v": 0.7, "erase": 0.9, "gate": 0.2}
# What comes through few channels, in the order of the option low_rank_dims.
SMALL_MAPS = ("a_proj", "erase_proj", "value_proj", "g_proj")
# The fastest decay a token, exp(-e^(-1/2)) = 0.545: the authors' bound for stable training.
RATE = math.exp(-0.5)


def arguments(projections: Projections) -> Arguments:
    """The rank-one part a b^T = -u (eta * u)^T sees the undecayed state."""
    log_decay = -RATE * torch.sigmoid(computed(projections.need("decay_logits")))
    erase = F.normalize(computed(projections.k) * projections.need("erase_scale"), dim=-1)
    rate = torch.sigmoid(computed(projections.need("erase_logits")))
    key = written_key(projections).to(projections.k.dtype)
    given = projections.qkv | {"k": key, "log_decay": log_decay, "scale": 1.0}
    return given | {"a": -erase, "b": rate * erase}


def read_out(o: Tensor, projections: Projections) -> Tensor:
    """Add the bonus; the layer has normalised o before."""
    read = computed(projections.q) * written_key(projections) * projections.need("bonus")
    return (o + read.sum(-1, keepdim=True) * projections.v).to(o.dtype)


def written_key(projections: Projections) -> Tensor:
    rate = torch.sigmoid(computed(projections.need("erase_logits")))
    return projections.k * (1 + (rate - 1) * projections.need("replace_scale"))


class RWKV7(ShiftedMixer):
    """RWKV-7: S = S (Diag(w) - u (eta * u)^T) + v k'^T, the rank-one part seeing the old state.

    Every projection reads x mixed with the token before (token shift: `shift` [N, 1, hidden_size]
    in the state). With `shared`, layers after the first mix their values with the first layer's;
    without, or as the first, a layer uses its own. Group norm with eps 64e-5 whatever norm_eps; the
    output gate has its sigmoid between its two maps. The paper's heads have 64
    channels.
    """

    rule = Rule(
        name="rwkv7", title="RWKV-7", operator="dplr", decay="channel", erase="free",
        recurrence="S = S (Diag(w) - u (eta * u)^T) + v k'^T",
        read_out="o = norm(S q) + (q . (bonus * k')) v",
        objective="|S - S' Diag(w)|^2 + 2 <S (eta * u), S' u> - 2 <S k', v>",
        source="arXiv 2503.14456, section 4 and appendix on initialisation",
        arguments=arguments, read_out_function=read_out,
    )  # fmt: skip
    of_tokens = (FIRST_VALUES,)
    float32_parameters = (
        *("shift_mix", "decay_bias", "erase_bias", "value_bias"),
        *("erase_scale", "replace_scale", "bonus"),
    )
    # The authors decay large projections and none of the small maps.
    roles = dict.fromkeys(("erase_proj", "value_proj", "g_proj"), "gate")
    value_proj: nn.Module | None

    @classmethod
    def defaults(cls) -> dict[str, str]:
        return super().defaults() | {"output_gate": "an output gate"}

    def find_place(self, layer_types: Sequence[str], layer_index: int) -> None:
        """Let the first layer of this kind, which has no values to mix with, keep its own."""
        if self.rule.name not in layer_types[:layer_index]:
            self.value_proj = None
            self.register_parameter("value_bias", None)

    def build_projections(self) -> None:
        """Draw q, k and v in the authors' ranges: a small k starts with a small state."""
        super().build_projections()
        for name, bound in (("q", 0.5), ("k", 0.05), ("v", 0.5)):
            bound *= self.hidden_size**-0.5
            nn.init.uniform_(getattr(self, f"{name}_proj").weight, -bound, bound)

    def build_gates(self) -> None:
        super().build_gates()
        heads, key_size = self.num_heads, self.head_k_dim
        key_channels, value_channels = heads * key_size, heads * self.head_v_dim
        place = self.hidden_size, self.layer_index, self.num_layers
        self.shift_mix = float32_parameter(first_shares(SHIFT_POWERS.values(), *place))
        self.a_proj = self.small_map(1.8, 0.5, key_channels, nn.Tanh())
        # From slow in the first channels to fast in the last.
        share = torch.arange(key_channels, dtype=torch.float32) / max(1, key_channels - 1)
        decay_bias = -6.5 + 5 * share.pow(0.85 + self.depth**0.5)
        self.decay_bias = float32_parameter(decay_bias.view(heads, key_size))
        self.erase_proj = self.small_map(1.8, 0.5, key_channels)
        self.erase_bias = float32_parameter(torch.zeros(heads, key_size))
        self.value_proj = None
        self.register_parameter("value_bias", None)
        if self.layer_index > 0:
            self.value_proj = self.small_map(1.3, 0.5, value_channels)
            self.value_bias = float32_parameter(torch.ones(heads, self.head_v_dim))
        self.erase_scale = float32_parameter(
            torch.full((heads, key_size), 0.85, dtype=torch.float32)
        )
        self.replace_scale = float32_parameter(torch.ones(heads, key_size))
        self.bonus = float32_parameter(torch.zeros(heads, key_size))

    def output_gate_projection(self) -> nn.Module:
        """Project the shifted x through few channels to the gate, without a last activation."""
        return self.small_map(0.6, 0.8, self.num_v_heads * self.head_v_dim, nn.Sigmoid())

    def adopt(self, config: Any) -> None:
        """Lead the small maps through as many channels as the model says."""
        if (ranks := getattr(config, "low_rank_dims", None)) is None:
            return
        for name, rank in zip(SMALL_MAPS, ranks, strict=True):
            if isinstance(small := getattr(self, name), nn.Sequential):
                inner = small[1] if len(small) == 3 else None
                size = self.head_k_dim if name in SMALL_MAPS[:2] else self.head_v_dim
                setattr(self, name, self.map_through(rank, self.num_heads * size, inner))

    def low_rank_dims(self) -> tuple[int, ...]:
        """Channels that the decay, the erase, the value and the gate come through."""
        maps = (getattr(self, name) for name in SMALL_MAPS)
        return tuple(small[0].out_features for small in maps if small is not None)

    def small_map(
        self, factor: float, power: float, outputs: int, activation: nn.Module | None = None
    ) -> nn.Sequential:
        """A map through factor * hidden_size^power channels, that starts at zero."""
        rank = max(32, 32 * round(factor * self.hidden_size**power / 32))
        return self.map_through(rank, outputs, activation)

    def map_through(self, rank: int, outputs: int, activation: nn.Module | None) -> nn.Sequential:
        small = low_rank(self.hidden_size, rank, outputs, activation=activation)
        down, up = small.parameters()
        nn.init.zeros_(down)
        # The QR decomposition behind it has no 16-bit version.
        up.data.copy_(nn.init.orthogonal_(computed(up.detach()), gain=0.1))
        return small

    def project(self, call: LayerCall) -> Projections:
        x = shifted(call, SHIFT_POWERS, self.shift_mix)
        v = self.by_head(self.v_proj(x["v"]))
        if self.value_proj is None or self.value_bias is None:
            call.shared[FIRST_VALUES] = v
        elif (first := call.shared.get(FIRST_VALUES)) is not None:
            share = torch.sigmoid(self.by_head(self.value_proj(x["v"])) + self.value_bias)
            v = torch.lerp(v, first, share.to(v.dtype))
        return Projections(
            q=self.by_key(self.q_proj(x["q"])), k=self.by_key(self.k_proj(x["k"])), v=v,
            decay_logits=self.by_key(self.a_proj(x["decay"])) + self.decay_bias,
            erase_logits=self.by_key(self.erase_proj(x["erase"])) + self.erase_bias,
            output_gate=self.gate(x["gate"]),
            erase_scale=self.erase_scale, replace_scale=self.replace_scale, bonus=self.bonus,
        )  # fmt: skip

    def finish(self, o: Tensor, projections: Projections, call: LayerCall) -> Tensor:
        y = self.rule.read_out_function(self.o_norm(o), projections)
        if projections.output_gate is not None:
            y = y * projections.output_gate
        return self.o_proj(y.flatten(-2))
