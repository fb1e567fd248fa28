"""HGRN-2: what a key channel forgets is what it writes with.

S_t = S_{t-1} Diag(a_t) + v_t (1 - a_t)^T        o_t = S_t q_t
a_t = lb + (1 - lb) sigmoid(decay_logits_t)
"""

import torch
import torch.nn.functional as F

from deltarule.rules.gates import computed
from deltarule.rules.objectives import Minimiser, stay_and_write
from deltarule.rules.rule import Carry, Mapped, Projections, Rule

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
    update=Minimiser(stay_and_write),
)
