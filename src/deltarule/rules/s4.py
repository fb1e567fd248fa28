"""S4 with a real diagonal: Mamba's recurrence with nothing in it that depends on the input.

S_t = S_{t-1} * exp(-(dt 1^T) * exp(A_log)) + B * (v_t 1^T)        o_t = (S_t * C) 1 + D * v_t
"""

from torch import Tensor

from deltarule.rules.rule import Arguments, System


def arguments(v: Tensor, *, log_step: Tensor, A_log: Tensor, B: Tensor, C: Tensor) -> Arguments:
    """Arguments of `selective_scan`: B and C are its k and q, each entry with its own constant."""
    delta = log_step.exp().expand(v.shape)
    return {"q": C, "k": B, "v": v, "delta": delta, "A": -A_log.exp(), "scale": 1.0}


SYSTEM = System(
    name="s4",
    title="S4 (elementwise form)",
    operator="selective_scan",
    recurrence="S = S * exp(-(dt 1^T) * exp(A_log)) + B * (v 1^T)",
    read_out="o = (S * C) 1 + D * v",
    decay="element",
    erase="none",
    objective="",
    source="arXiv 2406.06484, table 4; real diagonal and starting values of arXiv 2206.11893",
    state_size="HV V K",
    forms="recurrent, chunked, GPU kernel",
)
