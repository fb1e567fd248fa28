"""The gates that several rules share, computed in float32 at least."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.kernels import gate_maps as plain
from deltarule.kernels.gate_maps import computed as computed
from deltarule.ops import gates as fused
from deltarule.ops.dispatch import Implementation, Table, always, choose
from deltarule.ops.fused import run_fused, why_not_fused
from deltarule.rules.rule import Projections


def unit(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6): what normalize_qk does, for rules whose operator lacks it."""
    x = computed(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def per_value_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, H, K] -> [B, T, HV, K]: value head h reads key head h * H // HV."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def write_strength(projections: Projections) -> Tensor:
    """beta = beta_max * sigmoid(beta_logits)."""
    call = Strength(projections.need("beta_logits"), projections.beta_max)
    return choose(STRENGTHS, call, "auto", call.logits.device).run(call)


def discretised_log_decay(projections: Projections) -> Tensor:
    """log_decay = -exp(A_log) * dt, for each head or for each key channel."""
    return step_and_log_decay(projections, step=False)[1]


def step_and_log_decay(projections: Projections, step: bool = True) -> tuple[Tensor, Tensor]:
    """dt = softplus(decay_logits + dt_bias), which nobody may read without `step`; log_decay."""
    logits, A_log, dt_bias = (projections.need(name) for name in Decay._fields[:3])
    call = Decay(logits, A_log, dt_bias, step)
    return choose(DECAYS, call, "auto", logits.device).run(call)


class Strength(NamedTuple):
    """What one write strength is made of."""

    logits: Tensor
    beta_max: float


class Decay(NamedTuple):
    """What one decay is made of."""

    decay_logits: Tensor
    A_log: Tensor
    dt_bias: Tensor
    step: bool


def torch_write_strength(call: Strength) -> Tensor:
    """Plain PyTorch."""
    return plain.write_strength(*call)


def triton_write_strength(call: Strength) -> Tensor:
    """One kernel."""
    beta: Tensor = run_fused(fused.write_strength, *call)
    return beta


def torch_decay(call: Decay) -> tuple[Tensor, Tensor]:
    """Plain PyTorch."""
    return plain.step_and_log_decay(*call[:3])


def triton_decay(call: Decay) -> tuple[Tensor, Tensor]:
    """One kernel for both."""
    log_decay, dt = run_fused(fused.log_decay, *call)
    return dt, log_decay


def why_not_triton(call: Strength | Decay) -> str | None:
    """What the Triton kernels cannot do."""
    return why_not_fused(call[0])


# In the order in which they are preferred.
STRENGTHS: Table[Strength, Tensor] = {
    "triton": Implementation(why_not=why_not_triton, run=triton_write_strength),
    "torch": Implementation(why_not=always, run=torch_write_strength),
}
DECAYS: Table[Decay, tuple[Tensor, Tensor]] = {
    "triton": Implementation(why_not=why_not_triton, run=triton_decay),
    "torch": Implementation(why_not=always, run=torch_decay),
}
