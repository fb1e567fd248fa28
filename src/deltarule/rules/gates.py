"""The gates that several rules share, computed in float32 at least."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.rules.rule import Projections


def computed(x: Tensor) -> Tensor:
    """Widen 16-bit numbers to float32: a gate lives for thousands of tokens."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def write_strength(projections: Projections) -> Tensor:
    """beta = beta_max * sigmoid(beta_logits)."""
    return projections.beta_max * torch.sigmoid(computed(projections.need("beta_logits")))


def step_size(projections: Projections) -> Tensor:
    """dt = softplus(decay_logits + dt_bias)."""
    return F.softplus(computed(projections.need("decay_logits")) + projections.need("dt_bias"))


def discretised_log_decay(projections: Projections) -> Tensor:
    """log_decay = -exp(A_log) * dt, for each head or for each key channel."""
    dt = step_size(projections)
    rate = computed(projections.need("A_log")).exp()
    return -(rate.unsqueeze(-1) if dt.ndim == 4 else rate) * dt
