"""The gates that several rules share, computed in float32 at least."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.rule import Arguments, Projections
from deltarule.ops.delta_rule import gate_logits as plain
from deltarule.ops.delta_rule.gate_logits import BetaLogits, DecayLogits
from deltarule.ops.fused import gates as fused
from deltarule.ops.fused_kernels import kernel_runs, why_not_fused
from deltarule.ops.sequences import computed as computed

DT_RANGE = (1e-3, 1e-1)
# A rate of zero would have a logarithm of minus infinity.
SMALLEST = 1e-4
# Tokens; heads are spread from above this.
SHORTEST_HORIZON = 8.0


def unit(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6): what normalize_qk does, for rules whose operator lacks it."""
    x = computed(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def per_value_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, H, ..] -> [B, T, HV, ..]: value head h reads key head h * H // HV."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def gate_of(gate: Tensor | BetaLogits | DecayLogits) -> Tensor:
    """The gate itself, or what its logits make: by one kernel, or in plain PyTorch."""
    if isinstance(gate, Tensor):
        return gate
    if isinstance(gate, DecayLogits):
        logits, A_log, dt_bias, bound = gate
        if bound is not None:
            return plain.bounded_log_decay(logits, A_log, dt_bias, bound)
        return log_decay(logits, A_log, dt_bias, False)[1]
    kernel = kernel_runs(gate.logits, why_not_fused(gate.logits))
    return (fused if kernel else plain).write_strength(*gate)


def log_decay(logits: Tensor, A_log: Tensor, dt_bias: Tensor, step: bool) -> tuple[Tensor, Tensor]:
    """dt = softplus(logits + dt_bias), which is valid only with `step`; and -exp(A_log) * dt."""
    if not kernel_runs(logits, why_not_fused(logits)):
        return plain.step_and_log_decay(logits, A_log, dt_bias)
    decay, dt = fused.log_decay(logits, A_log, dt_bias, step)
    return dt, decay


def strength_of(projections: Projections) -> Tensor:
    """beta = beta_max * sigmoid(beta_logits)."""
    return gate_of(BetaLogits(projections.need("beta_logits"), projections.beta_max))


def log_decay_of(projections: Projections) -> Tensor:
    """A decay for each head or for each key channel, bounded or not."""
    return gate_of(DecayLogits(*decay_parts(projections), projections.gate_lower_bound))


def gates_of(projections: Projections, decays: bool) -> Arguments:
    """beta and, if wanted, log_decay, both by one kernel call; for a step what it makes them of."""
    bound, logits = projections.gate_lower_bound, projections.need("beta_logits")
    gates: Arguments = {"beta": BetaLogits(logits, projections.beta_max)}
    if decays:
        gates["log_decay"] = DecayLogits(*decay_parts(projections), bound)
    if projections.decoding:
        return gates
    if decays and bound is None and kernel_runs(logits, why_not_fused(logits)):
        gates["log_decay"], gates["beta"] = fused.gates(*gates["log_decay"][:3], *gates["beta"])
    return {name: gate_of(x) for name, x in gates.items()}


def step_and_log_decay(projections: Projections) -> tuple[Tensor, Tensor]:
    return log_decay(*decay_parts(projections), True)


def decay_parts(projections: Projections) -> tuple[Tensor, Tensor, Tensor]:
    need = projections.need
    return need("decay_logits"), need("A_log"), need("dt_bias")


def initial_A_log(heads: int, smallest: float) -> Tensor:
    """Natural log of a rate drawn from U(smallest, 16), [HV] in float32."""
    rate = torch.empty(heads, dtype=torch.float32).uniform_(smallest, 16)
    # PyTorch computes shapes alone in Python, for which it loads the compiler.
    return rate if rate.is_meta else rate.clamp(min=SMALLEST).log()


def initial_log_step(*sizes: int) -> Tensor:
    """Natural log of dt, drawn log-uniformly from [1e-3, 1e-1], in float32."""
    smallest, largest = (math.log(dt) for dt in DT_RANGE)
    return torch.empty(sizes, dtype=torch.float32).uniform_(smallest, largest)


def initial_dt_bias(*sizes: int) -> Tensor:
    """b with softplus(b) = dt, drawn log-uniformly, in float32."""
    log_dt = initial_log_step(*sizes)
    if log_dt.is_meta:
        return log_dt
    dt = log_dt.exp()
    # The inverse of softplus, log(e^dt - 1), without the cancellation for small dt.
    return dt + torch.log(-torch.expm1(-dt))


def spread_A_log(dt_bias: Tensor, longest: float) -> Tensor:
    """Natural log of the rate that gives each head a horizon of its own, [HV] in float32.

    horizon_h = 1 / (exp(A_log_h) dt_h) = 8 (longest / 8)^((h + 1) / HV) tokens: the last head
    starts with the longest. dt_h is the geometric mean of a head's channels.
    """
    parts = torch.arange(1, len(dt_bias) + 1) / len(dt_bias)
    horizons = SHORTEST_HORIZON * (longest / SHORTEST_HORIZON) ** parts
    return -horizons.log() - _log_dt(dt_bias)


def _log_dt(dt_bias: Tensor) -> Tensor:
    return F.softplus(dt_bias).log().view(len(dt_bias), -1).mean(-1)


def starting_horizons(model: nn.Module) -> list[list[float]]:
    """Tokens after which each head of each gated layer keeps 1/e, at gate logits of zero.

    Layers whose decay has a lower bound are left out: their heads have no one rate.
    """
    gated: list[Any] = [
        m for m in model.modules() if getattr(m, "has_rates", False) and m.gate_lower_bound is None
    ]
    rates = [(m.A_log + _log_dt(m.dt_bias)).exp() for m in gated]
    return [[round(1 / rate, 1) for rate in layer.tolist()] for layer in rates]


def float32_parameter(value: Tensor) -> nn.Parameter:
    """One of a layer's float32_parameters, whatever torch's default dtype."""
    return nn.Parameter(value.float())


def low_rank(
    inputs: int, rank: int, outputs: int, *, bias: bool = False, activation: nn.Module | None = None
) -> nn.Sequential:
    """Project through few channels, with an activation on them if any; the bias comes last."""
    down, up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias)
    return nn.Sequential(down, up) if activation is None else nn.Sequential(down, activation, up)
