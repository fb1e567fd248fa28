"""RWKV-7: decay each key channel, erase along one key and write along another.

S_t = S_{t-1} (Diag(w_t) - u_t (eta_t * u_t)^T) + v_t k'_t^T
w_t = exp(-e^(-1/2) sigmoid(decay_logits_t))        eta_t = sigmoid(erase_logits_t)
u_t = unit(k_t * erase_scale)        k'_t = k_t * (1 + (eta_t - 1) * replace_scale)
o_t = S_t q_t, normalised, + (q_t * k'_t * bonus summed over channels) v_t
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.rules.gates import computed
from deltarule.rules.objectives import Minimiser, stay_and_replace
from deltarule.rules.rule import Carry, Mapped, Projections, Rule

# The fastest decay a token, exp(-e^(-1/2)) = 0.545: the authors' bound for stable training.
RATE = math.exp(-0.5)


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """The rank-one part a b^T = -u (eta * u)^T sees the undecayed state."""
    log_decay = -RATE * torch.sigmoid(computed(projections.need("decay_logits")))
    erase = F.normalize(computed(projections.k) * projections.need("erase_scale"), dim=-1)
    rate = torch.sigmoid(computed(projections.need("erase_logits")))
    key = written_key(projections).to(projections.k.dtype)
    given = projections.qkv | {"k": key, "log_decay": log_decay, "scale": 1.0}
    return given | {"a": -erase, "b": rate * erase}, carry


def read_out(o: Tensor, projections: Projections, carry: Carry | None = None) -> Tensor:
    """Add the bonus; the layer has normalised o before."""
    read = computed(projections.q) * written_key(projections) * projections.need("bonus")
    return (o + read.sum(-1, keepdim=True) * projections.v).to(o.dtype)


def written_key(projections: Projections) -> Tensor:
    """k' = k (1 + (eta - 1) replace_scale)."""
    rate = torch.sigmoid(computed(projections.need("erase_logits")))
    return projections.k * (1 + (rate - 1) * projections.need("replace_scale"))


RULE = Rule(
    name="rwkv7",
    title="RWKV-7",
    operator="dplr",
    recurrence="S = S (Diag(w) - u (eta * u)^T) + v k'^T",
    read_out="o = norm(S q) + (q . (bonus * k')) v",
    decay="channel",
    erase="free",
    objective="|S - S' Diag(w)|^2 + 2 <S (eta * u), S' u> - 2 <S k', v>",
    source="arXiv 2503.14456, section 4",
    arguments=arguments,
    read_out_function=read_out,
    update=Minimiser(stay_and_replace),
)
