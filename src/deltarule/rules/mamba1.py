"""Mamba-1: each entry of the state has its own rate, each value channel its own step size.

S_t = S_{t-1} * exp(-(dt_t 1^T) * exp(A_log)) + (dt_t * v_t) k_t^T        o_t = S_t q_t + D * v_t
dt_t = softplus(step_logits_t + dt_bias)
"""

import torch.nn.functional as F
from torch import Tensor

from deltarule.rules.gates import computed
from deltarule.rules.rule import Arguments, System


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, step_logits: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Arguments:
    """Arguments of `selective_scan`; not scaled, because beside D * v_t its size matters."""
    delta = F.softplus(computed(step_logits) + dt_bias)
    write = (delta * v).to(v.dtype)
    return {"q": q, "k": k, "v": write, "delta": delta, "A": -A_log.exp(), "scale": 1.0}


SYSTEM = System(
    name="mamba1",
    title="Mamba",
    operator="selective_scan",
    recurrence="S = S * exp(-(dt 1^T) * exp(A_log)) + (dt * v) k^T",
    read_out="o = S q + D * v",
    decay="element",
    erase="none",
    objective="",
    source="arXiv 2312.00752, algorithm 2 and section 3.6",
    state_size="HV V K",
    forms="recurrent, chunked, GPU kernel",
)
