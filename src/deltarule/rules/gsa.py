"""Gated slot attention: slots that forget exactly what they take in.

S^k_t = S^k_{t-1} Diag(a_t) + k_t (1 - a_t)^T        S^v_t = S^v_{t-1} Diag(a_t) + v_t (1 - a_t)^T
o_t = S^v_t softmax((S^k_t)^T q_t)        a_t = sigmoid(slot_logits_t)^(1/8)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.rules.gates import computed
from deltarule.rules.rule import Arguments, System

# Keeps most decays near one, whatever the logit.
TEMPERATURE = 8


def arguments(slot_logits: Tensor) -> Arguments:
    """The slots and their decay, of `two_memories`; q is not scaled, as in the release."""
    log_decay = F.logsigmoid(computed(slot_logits)) / TEMPERATURE
    return {"slots": -torch.expm1(log_decay), "log_decay": log_decay, "scale": 1.0}


SYSTEM = System(
    name="gsa",
    title="Gated Slot Attention",
    operator="two_memories",
    recurrence="S^k = S^k Diag(a) + k (1 - a)^T, S^v = S^v Diag(a) + v (1 - a)^T",
    read_out="o = S^v softmax((S^k)^T q)",
    decay="channel",
    erase="none",
    objective="",
    source="arXiv 2409.07146, eq. 8 and section 4",
    state_size="H M (K + V)",
    forms="recurrent, chunked, GPU kernel",
)
