"""Lightning Attention: constant decays that grow weaker with depth.

S_t = g_h S_{t-1} + v_t k_t^T        log g_h = -(8 / HV) (1 - layer / layers) h, h = 0..HV-1
"""

import torch

from deltarule.rules.objectives import Minimiser, stay_and_write
from deltarule.rules.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """Head 0 never forgets."""
    heads = projections.v.shape[2]
    dtype = torch.promote_types(projections.v.dtype, torch.float32)
    head = torch.arange(heads, dtype=dtype, device=projections.v.device)
    log_decay = -(8 / heads) * (1 - projections.depth) * head
    return projections.qkv | {"beta": None, "log_decay": log_decay}, carry


RULE = Rule(
    name="lightning",
    title="Lightning Attention",
    operator="delta_rule",
    recurrence="S = g_h S + v k^T",
    read_out="o = S q",
    decay="constant",
    erase="none",
    objective="|S - g S'|^2 - 2 <S k, v>",
    source="arXiv 2401.04658, section 3; slopes of TransNormerLLM, arXiv 2307.14995",
    arguments=arguments,
    update=Minimiser(stay_and_write),
)
