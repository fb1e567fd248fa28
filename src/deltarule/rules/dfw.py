"""Decaying fast weights: a gate for each value channel from the left, one for each key channel.

S_t = Diag(b_t) S_{t-1} Diag(a_t) + v_t k_t^T        o_t = S_t q_t
a_t = sigmoid(decay_logits_t)        b_t = sigmoid(value_decay_logits_t)
"""

import torch.nn.functional as F
from torch import Tensor

from deltarule.rules.gates import computed
from deltarule.rules.rule import Arguments, System


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, decay_logits: Tensor, value_decay_logits: Tensor
) -> Arguments:
    """Arguments of `selective_scan`."""
    decays = {
        "log_decay": F.logsigmoid(computed(decay_logits)),
        "value_log_decay": F.logsigmoid(computed(value_decay_logits)),
    }
    return {"q": q, "k": k, "v": v, **decays}


SYSTEM = System(
    name="dfw",
    title="Decaying fast weights",
    operator="selective_scan",
    recurrence="S = Diag(b) S Diag(a) + v k^T",
    read_out="o = S q",
    decay="element",
    erase="none",
    objective="|S - Diag(b) S' Diag(a)|^2 - 2 <S k, v>",
    source="arXiv 2210.04243, section 4; table 4 of arXiv 2406.06484",
    state_size="HV V K",
    forms="recurrent, chunked, GPU kernel",
)
