"""Gated DeltaNet-2: one gate for each key channel that is erased, one for each value channel."""

from dataclasses import replace

import torch
from torch import nn

from deltarule.nn.feature_maps import qk_normed
from deltarule.nn.gates import computed, log_decay_of, per_value_head
from deltarule.nn.kda import KDA
from deltarule.nn.layout import split
from deltarule.nn.rule import Arguments, LayerCall, Projections, Rule


def arguments(projections: Projections) -> Arguments:
    """a b^T = -(a_t * b_t * k_t) k_t^T: the operator's rank-one part sees the undecayed state."""
    heads, dtype = projections.v.shape[2], projections.v.dtype
    log_decay = log_decay_of(projections)
    q, k = qk_normed(projections, projections.q), qk_normed(projections, projections.k)
    key = per_value_head(k, heads)
    strength = projections.beta_max * torch.sigmoid(computed(projections.need("erase_logits")))
    v = torch.sigmoid(computed(projections.need("write_logits"))) * projections.v
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "log_decay": log_decay}
    return given | {"a": -log_decay.exp() * strength * key, "b": key}


class GatedDeltaNet2(KDA):
    """Gated DeltaNet-2: S = S Diag(a) (I - (b * k) k^T) + (w * v) k^T with unit keys.

    KDA with, in place of one write strength a head, an erase gate b for each key channel, in [0,
    beta_max], and a write gate w for each value channel, in [0, 1].
    """

    rule = Rule(
        name="gated_deltanet2", title="Gated DeltaNet-2", operator="dplr", decay="channel",
        erase="free",
        recurrence="S = S Diag(a) (I - (b * k) k^T) + (w * v) k^T",
        objective="|S - S' Diag(a)|^2 - 2 <S k, w * v - S' Diag(a) (b * k)>",
        source="arXiv 2605.22791, section 3",
        arguments=arguments,
    )  # fmt: skip
    options = KDA.options - {"gate_lower_bound"}
    frees_strength = True
    roles = {"erase_proj": "gate", "write_proj": "gate"}

    def build_gates(self) -> None:
        super().build_gates()
        heads = self.num_v_heads
        self.erase_proj = nn.Linear(self.hidden_size, heads * self.head_k_dim, bias=False)
        self.write_proj = nn.Linear(self.hidden_size, heads * self.head_v_dim, bias=False)

    def project(self, call: LayerCall) -> Projections:
        erase = split(self.erase_proj(call.x), self.num_v_heads, self.head_k_dim)
        write = split(self.write_proj(call.x), self.num_v_heads, self.head_v_dim)
        return replace(super().project(call), erase_logits=erase, write_logits=write)
