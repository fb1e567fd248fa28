"""Comba: a delta rule whose erase sees the state before its decay, and a corrected query."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from deltarule.nn import gates
from deltarule.nn.feature_maps import qk_normed
from deltarule.nn.gated_deltanet import GatedDeltaNet
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule


def arguments(projections: Projections) -> Arguments:
    """The key that erases is the written one, shorter; the query loses some of the written one."""
    q, k = qk_normed(projections, projections.q), qk_normed(projections, projections.k)
    q = q - projections.need("D").unsqueeze(-1) * k
    return fed_back(projections, q, k, share(projections) * k)


def released_arguments(projections: Projections) -> Arguments:
    """Norms come last, of the key that erases as well: it is the written key."""
    p = share(projections) * gates.computed(projections.k)
    q = gates.computed(projections.q) - projections.need("D").unsqueeze(-1) * p
    q, k, p = (qk_normed(projections, x) for x in (q, projections.k, p))
    return fed_back(projections, q, k, p)


def share(projections: Projections) -> Tensor:
    return torch.sigmoid(projections.need("erase_scale")).unsqueeze(-1)


def fed_back(projections: Projections, q: Tensor, k: Tensor, p: Tensor) -> Arguments:
    """a b^T = -(beta_t p_t) k_t^T: the operator's rank-one part sees the undecayed state."""
    heads, dtype = projections.v.shape[2], projections.v.dtype
    beta = gates.strength_of(projections).unsqueeze(-1)
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": (beta * projections.v).to(dtype)}
    given |= {"a": -beta * gates.per_value_head(p, heads), "b": gates.per_value_head(k, heads)}
    return given | {"log_decay": gates.log_decay_of(projections)}


class Comba(GatedDeltaNet):
    """Comba: S = S (a - beta p k^T) + beta v k^T, o = S (q - D k), p = sigmoid(erase_scale) k.

    The output gate is a sigmoid; erase_scale and D start at ones for each key head (the authors use
    D = 0.02 in small models).
    """

    rule = Rule(
        name="comba", title="Comba", operator="dplr", decay="head", erase="free",
        recurrence="S = S (a - beta p k^T) + beta v k^T", read_out="o = S (q - D k)",
        objective="|S - a S'|^2 - 2 <S k, beta (v - S' p)>",
        source="arXiv 2506.02475, eq. 5",
        arguments=arguments,
    )  # fmt: skip
    frees_strength = True
    gate_activation = "sigmoid"
    float32_parameters = ("A_log", "dt_bias", "D", "erase_scale")

    def build_gates(self) -> None:
        super().build_gates()
        ones = torch.ones(self.num_heads, dtype=torch.float32)
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.erase_scale = gates.float32_parameter(ones)
        self.D = gates.float32_parameter(ones.clone())

    def project(self, call: LayerCall) -> Projections:
        return replace(super().project(call), erase_scale=self.erase_scale)


class CombaReleased(Comba):
    """Comba as its authors released it: S = S (a - beta k k^T) + beta v k^T, o = S unit(q - D p).

    p = sigmoid(erase_scale) k corrects the query before q and k are normed, and erases at the full
    length of a unit key. Parameters and defaults are those of `Comba`.
    """

    rule = replace(
        Comba.rule, name="comba_released", title="Comba (released)", page="comba",
        recurrence="S = S (a - beta k k^T) + beta v k^T", read_out="o = S unit(q - D p)",
        objective="|S - a S'|^2 - 2 <S k, beta (v - S' k)>",
        source="arXiv 2506.02475, the authors' released layer",
        arguments=released_arguments,
    )  # fmt: skip
