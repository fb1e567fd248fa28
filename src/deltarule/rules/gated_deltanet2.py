"""Gated DeltaNet-2: one gate for each key channel that is erased, one for each value channel.

S_t = S_{t-1} Diag(a_t) (I - (b_t * k_t) k_t^T) + (w_t * v_t) k_t^T        |k_t| = |q_t| = 1
a_t as in KDA, b_t = beta_max sigmoid(erase_logits_t), w_t = sigmoid(write_logits_t)
"""

import torch

from deltarule.rules.gates import computed, discretised_log_decay, per_value_head, unit
from deltarule.rules.objectives import Minimiser, stay_and_replace
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """a b^T = -(a_t * b_t * k_t) k_t^T: the operator's rank-one part sees the undecayed state."""
    heads, dtype = projections.v.shape[2], projections.v.dtype
    log_decay = discretised_log_decay(projections)
    q, k = unit(projections.q), unit(projections.k)
    key = per_value_head(k, heads)
    strength = projections.beta_max * torch.sigmoid(computed(projections.need("erase_logits")))
    v = torch.sigmoid(computed(projections.need("write_logits"))) * projections.v
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "log_decay": log_decay}
    return given | {"a": -log_decay.exp() * strength * key, "b": key}, carry


RULE = Rule(
    name="gated_deltanet2",
    title="Gated DeltaNet-2",
    operator="dplr",
    recurrence="S = S Diag(a) (I - (b * k) k^T) + (w * v) k^T",
    read_out="o = S q",
    decay="channel",
    erase="free",
    objective="|S - S' Diag(a)|^2 - 2 <S k, w * v - S' Diag(a) (b * k)>",
    source="arXiv 2605.22791, section 3",
    arguments=arguments,
    update=Minimiser(stay_and_replace),
)
