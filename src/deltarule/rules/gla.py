"""Gated Linear Attention: one decay for each key channel.

S_t = S_{t-1} Diag(a_t) + v_t k_t^T        a_t = sigmoid(decay_logits_t)^(1/16)
"""

import torch.nn.functional as F

from deltarule.rules.gates import computed
from deltarule.rules.objectives import Minimiser, stay_and_write
from deltarule.rules.rule import Carry, Mapped, Projections, Rule

# Keeps most decays near one, whatever the logit.
TEMPERATURE = 16


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """log_decay = logsigmoid(decay_logits) / 16."""
    log_decay = F.logsigmoid(computed(projections.need("decay_logits"))) / TEMPERATURE
    return projections.qkv | {"beta": None, "log_decay": log_decay}, carry


RULE = Rule(
    name="gla",
    title="Gated Linear Attention",
    operator="delta_rule",
    recurrence="S = S Diag(a) + v k^T",
    read_out="o = S q",
    decay="channel",
    erase="none",
    objective="|S - S' Diag(a)|^2 - 2 <S k, v>",
    source="arXiv 2312.06635, eq. 3 and section 4.4",
    arguments=arguments,
    update=Minimiser(stay_and_write),
)
