"""Longhorn as released: one step size for each value channel, the transition's diagonal only.

S_t = S_{t-1} * (1 - e_t (k_t * k_t)^T) + (e_t * v_t) k_t^T        o_t = S_t q_t + D * v_t
e_t = b_t / (1 + b_t |k_t|^2)        b_t = sigmoid(beta_logits_t + dt_bias)
"""

import torch
from torch import Tensor

from deltarule.rules.gates import computed
from deltarule.rules.rule import Arguments, System


def arguments(
    q: Tensor, k: Tensor, v: Tensor, *, beta_logits: Tensor, dt_bias: Tensor
) -> Arguments:
    """Arguments of `selective_scan`; 1 - e k^2 is in (0, 1] whatever the length of the key."""
    strength = torch.sigmoid(computed(beta_logits) + dt_bias)
    key_square = computed(k).square().sum(-1, keepdim=True)
    key_square = key_square.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    return {"q": q, "k": k, "v": v, "beta": strength / (1 + strength * key_square), "scale": 1.0}


SYSTEM = System(
    name="longhorn_released",
    title="Longhorn (released)",
    operator="selective_scan",
    recurrence="S = S * (1 - e (k * k)^T) + (e * v) k^T",
    read_out="o = S q + D * v",
    decay="none",
    erase="tied",
    objective="|S - S'|^2 + |S k - v|^2_b, then the diagonal of the step",
    source="arXiv 2407.14207, section 3.2 and the authors' released layer",
    state_size="HV V K",
    forms="recurrent, chunked, GPU kernel",
)
