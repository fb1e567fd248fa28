"""Comba: a delta rule that reads with a shorter key than it writes under, and a corrected query.

S_t = a_t S_{t-1} (I - beta_t p_t k_t^T) + beta_t v_t k_t^T        o_t = S_t (q_t - D p_t)
p_t = sigmoid(erase_scale) k_t, |k_t| = |q_t| = 1; a_t and beta_t as in Gated DeltaNet
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from deltarule.nn.call import Call
from deltarule.nn.gated_deltanet import GatedDeltaNet
from deltarule.nn.gates import discretised_log_decay, per_value_head, unit, write_strength
from deltarule.nn.objectives import Minimiser, stay_and_replace
from deltarule.nn.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """a b^T = -(a_t beta_t p_t) k_t^T: the operator's rank-one part sees the undecayed state."""
    heads, dtype = projections.v.shape[2], projections.v.dtype
    log_decay, beta = discretised_log_decay(projections), write_strength(projections)
    q, k = unit(projections.q), unit(projections.k)
    p = torch.sigmoid(projections.need("erase_scale")).unsqueeze(-1) * k
    q = q - projections.need("D").unsqueeze(-1) * p
    erase = -(log_decay.exp() * beta).unsqueeze(-1) * per_value_head(p, heads)
    v = beta.unsqueeze(-1) * projections.v
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "log_decay": log_decay}
    return given | {"a": erase, "b": per_value_head(k, heads)}, carry


RULE = Rule(
    name="comba",
    title="Comba",
    operator="dplr",
    recurrence="S = a S (I - beta p k^T) + beta v k^T",
    read_out="o = S (q - D p)",
    decay="head",
    erase="free",
    objective="|S - a S'|^2 - 2 <S k, beta (v - a S' p)>",
    source="arXiv 2506.02475, section 3",
    arguments=arguments,
    update=Minimiser(stay_and_replace),
)


class Comba(GatedDeltaNet):
    """Comba: S = a S (I - beta p k^T) + beta v k^T, o = S (q - D p), p = sigmoid(erase_scale) k.

    Defaults: Gated DeltaNet's, but the output gate is a sigmoid; erase_scale and D of ones for
    each key head (the authors use D = 0.02 in small models).

    Example:
        >>> import torch
        >>> layer = Comba(32, num_heads=2)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> layer.erase_scale.shape, state["recurrent"].shape
        (torch.Size([2]), torch.Size([1, 2, 24, 12]))

    Source: arXiv 2506.02475, section 3.
    """

    rule = RULE
    frees_strength = True
    gate_activation = "sigmoid"
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D", "erase_scale")

    erase_scale: nn.Parameter

    def build_gates(self) -> None:
        """Add the write strength, the share of the key that erases, and the query's correction."""
        super().build_gates()
        ones = torch.ones(self.num_heads, dtype=torch.float32)
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.gate_parameter("erase_scale", ones)
        self.gate_parameter("D", ones.clone())

    def project(self, call: Call) -> Projections:
        """Add the share of the key that erases."""
        return replace(super().project(call), erase_scale=self.erase_scale)
