"""HGRN-2: what a key channel forgets is what it writes with.

S_t = S_{t-1} Diag(a_t) + v_t (1 - a_t)^T        o_t = S_t q_t
a_t = lb + (1 - lb) sigmoid(decay_logits_t)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.arguments import check_own_heads
from deltarule.nn.call import Call
from deltarule.nn.delta import DeltaMixer
from deltarule.nn.gates import computed
from deltarule.nn.norm import RMSNorm
from deltarule.nn.rule import Carry, Mapped, Projections, Rule

# Below it the decay is a reset, and exp of its negative would overflow.
SMALLEST = -80.0


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """log a = log sigmoid(f) + log(1 + lb e^-f), and 1 - a = (1 - lb) sigmoid(-f)."""
    logits = computed(projections.need("decay_logits")).clamp(min=SMALLEST)
    bound = projections.lower_bound
    log_decay, k = F.logsigmoid(logits), torch.sigmoid(-logits)
    if bound is not None:
        log_decay = (log_decay + torch.log1p(bound * torch.exp(-logits))).clamp(max=0)
        k = (1 - bound) * k
    given = projections.qkv | {"k": k.to(projections.k.dtype), "beta": None}
    return given | {"log_decay": log_decay}, carry


RULE = Rule(
    name="hgrn2",
    title="HGRN-2",
    operator="delta_rule",
    recurrence="S = S Diag(a) + v (1 - a)^T",
    read_out="o = S q",
    decay="channel",
    erase="none",
    objective="|S - S' Diag(a)|^2 - 2 <S (1 - a), v>",
    source="arXiv 2404.07904, section 3",
    arguments=arguments,
)


# Where the first layer leaves the least decays of all layers.
LOWER_BOUNDS = "hgrn2_lower_bounds"


class HGRN2(DeltaMixer):
    """HGRN-2: S = S Diag(a) + v (1 - a)^T, a = lb + (1 - lb) sigmoid(f): `k_proj` computes f.

    The least decay lb of each channel grows with depth. The first HGRN-2 layer of a model learns it
    for all of them and hands it on in `shared`; a layer without `shared`, and the first one, have
    lb = 0.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads (128 in the paper), SiLU on q, no
    convolution, a norm over all heads together, no output gate. There are as many value heads as
    key heads.

    Examples:
        >>> import torch
        >>> y, state = HGRN2(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> y.shape
        torch.Size([1, 5, 32])

    Source: arXiv 2404.07904, section 3; lower bounds, arXiv 2311.04823, section 3.2.
    """

    rule = RULE
    float32_parameters: ClassVar[tuple[str, ...]] = ("bound_logits",)

    # Which of the bounds is this layer's; and the parameter of the one layer that owns them.
    bound_index: int = 0
    bound_logits: nn.Parameter | None

    def find_place(self, layer_types: Sequence[str], layer_index: int) -> None:
        """Count the layers of this kind: the first of several owns the bounds of all."""
        kinds = list(layer_types)
        self.bound_index = kinds[:layer_index].count(self.rule.name)
        if self.bound_index == 0 and (layers := kinds.count(self.rule.name)) > 1:
            sizes = layers, self.num_heads, self.head_k_dim
            self.gate_parameter("bound_logits", torch.ones(sizes, dtype=torch.float32))

    def check_options(self) -> None:
        """Refuse value heads that share a key head: each decay is also a key."""
        check_own_heads(self.rule.name, self.num_heads, self.num_v_heads)

    def activates(self, name: str) -> bool:
        """SiLU is for q alone: k is a logit, and v comes as it is."""
        return name == "q"

    def build_gates(self) -> None:
        """Leave the bounds to `find_place`: a layer alone has none."""
        super().build_gates()
        self.register_parameter("bound_logits", None)

    def build_norm(self) -> nn.Module:
        return RMSNorm(self.num_v_heads * self.head_v_dim, self.norm_eps)

    def project(self, call: Call) -> Projections:
        """Find this layer's least decays; f is where other layers have their keys."""
        p = super().project(call)
        q = p.q if self.conv_size else F.silu(p.q)
        return replace(p, q=q, decay_logits=p.k, lower_bound=self.lower_bound(call.shared))

    def lower_bound(self, shared: dict[str, Tensor]) -> Tensor | None:
        """[HV, K] the sum of softmax(bound_logits) over the layers from the second to this one."""
        if self.bound_logits is not None:
            share = self.bound_logits.softmax(0)
            shared[LOWER_BOUNDS] = share.cumsum(0) - share[0]
        if self.bound_index == 0 or LOWER_BOUNDS not in shared:
            return None
        return shared[LOWER_BOUNDS][self.bound_index]

    def finish(self, o: Tensor, projections: Projections, call: Call) -> Tensor:
        y = self.o_norm(o.flatten(-2))
        if projections.output_gate is not None:
            y = y * F.silu(projections.output_gate.flatten(-2))
        return self.o_proj(y)
