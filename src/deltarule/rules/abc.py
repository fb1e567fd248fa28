"""Attention with bounded memory: slots that hold a running mean of keys and values.

S^k_t = S^k_{t-1} Diag(a_t) + k_t (1 - a_t)^T        S^v_t = S^v_{t-1} Diag(a_t) + v_t (1 - a_t)^T
o_t = S^v_t softmax((S^k_t)^T q_t)        a_t = z_{t-1} / z_t        z_t = z_{t-1} + exp(s_t)

Undivided, the memories are S z_t: sums of k exp(s)^T and of v exp(s)^T.
"""

from torch import Tensor

from deltarule.rules.rule import Arguments, System


def arguments(logits: Tensor, log_sum_before: Tensor, log_sum: Tensor) -> Arguments:
    """The slots exp(s) / z and the decays of `two_memories`, from log z before and after a token.

    In logarithms nothing overflows, however large a logit is.
    """
    return {"slots": (logits - log_sum).exp(), "log_decay": log_sum_before - log_sum}


SYSTEM = System(
    name="abc",
    title="Attention with Bounded-memory Control",
    operator="two_memories",
    recurrence="S^k = (S^k z' + k phi^T) / z, S^v = (S^v z' + v phi^T) / z, z = z' + phi",
    read_out="o = S^v softmax((S^k)^T q)",
    decay="channel",
    erase="none",
    objective="",
    source="arXiv 2110.02488, eq. 6 and section 3.2 (ABC-MLP with exponential phi)",
    state_size="H M (K + V + 1)",
    forms="recurrent, chunked, GPU kernel",
)
