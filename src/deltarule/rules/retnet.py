"""RetNet: linear attention with one constant decay for each head.

S_t = g_h S_{t-1} + v_t k_t^T        g_h = 1 - 2^(-5 - h), h = 0..HV-1
"""

import torch

from deltarule.rules.objectives import Minimiser, stay_and_write
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """log_decay_h = log(1 - 2^(-5 - h))."""
    dtype = torch.promote_types(projections.v.dtype, torch.float32)
    head = torch.arange(projections.v.shape[2], dtype=dtype, device=projections.v.device)
    log_decay = torch.log1p(-torch.exp2(-5 - head))
    return projections.qkv | {"beta": None, "log_decay": log_decay}, carry


RULE = Rule(
    name="retnet",
    title="RetNet",
    operator="delta_rule",
    recurrence="S = g_h S + v k^T",
    read_out="o = S q",
    decay="constant",
    erase="none",
    objective="|S - g S'|^2 - 2 <S k, v>",
    source="arXiv 2307.08621, eq. 6 and 8",
    arguments=arguments,
    update=Minimiser(stay_and_write),
)
