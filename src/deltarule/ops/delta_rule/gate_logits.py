"""Logits in place of a step's gates: the arguments, and their checks."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.checks import check_dense, check_gate
from deltarule.ops.delta_rule.gate_maps import GateMaps
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments, check_erase
from deltarule.shapes import Beta, Decay


class DecayLogits(NamedTuple):
    """Logits for `log_decay`: log_decay = -exp(A_log) * softplus(logits + dt_bias).

    With a lower bound: log_decay = lower_bound * sigmoid(exp(A_log) * (logits + dt_bias)).

    logits: [B, T, HV], or [B, T, HV, K] for a decay of each key channel.
    A_log: Natural log of a rate of decay [HV].
    dt_bias: [HV], or [HV, K] for a decay of each key channel.
    lower_bound: Least log_decay, a number < 0 (KDA: -5). None: the first of the two maps.
    """

    logits: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None


class BetaLogits(NamedTuple):
    """Logits for `beta`: beta = beta_max * sigmoid(logits).

    logits: `[B, T*n, HV]`.
    beta_max: Largest write strength.
    """

    logits: Tensor
    beta_max: float = 1.0


def checked(
    inputs: Inputs,
    scale: float | None,
    beta: Beta | BetaLogits | None,
    log_decay: Decay | DecayLogits | None,
) -> tuple[Inputs, GateMaps]:
    """Checked inputs, logits in their gates' places, and the maps that are still to be done."""
    # The checks of the operators know gates, not logits.
    own = None if isinstance(beta, BetaLogits) else beta
    own_decay = None if isinstance(log_decay, DecayLogits) else log_decay
    inputs = check_arguments(inputs._replace(beta=own, log_decay=own_decay), scale)
    A_log = dt_bias = beta_max = lower_bound = None
    if isinstance(beta, BetaLogits):
        beta_max = check_beta_logits(beta, inputs)
        inputs = inputs._replace(beta=beta.logits)
    if isinstance(log_decay, DecayLogits):
        check_decay_logits(log_decay, inputs)
        logits, A_log, dt_bias, lower_bound = log_decay
        inputs = inputs._replace(log_decay=logits)
    return inputs, GateMaps(A_log, dt_bias, beta_max, lower_bound)


def check_beta_logits(beta: BetaLogits, inputs: Inputs) -> float:
    """Shape, dtype and device of the logits, and a number that they are multiplied with."""
    rows = inputs.v.shape[:3]
    check_part("beta.logits", beta.logits, inputs.q, {"[B, T*n, HV]": rows})
    check_erase(beta.logits, inputs.a, inputs.b, inputs.n_steps, inputs.normalize_qk)
    largest = beta.beta_max
    if isinstance(largest, bool) or not isinstance(largest, int | float | torch.SymFloat):
        raise ValueError(f"beta.beta_max must be a number, got {type(largest).__name__}")
    return float(largest)


def check_decay_logits(decay: DecayLogits, inputs: Inputs) -> None:
    """Shapes, dtypes and devices; the bias has a channel where the logits have one."""
    batch, tokens, heads, _ = inputs.output_shape
    channels = inputs.q.shape[3]
    head, channel = (batch, tokens, heads), (batch, tokens, heads, channels)
    shapes = {"[B, T, HV]": head, "[B, T, HV, K]": channel}
    check_part("log_decay.logits", decay.logits, inputs.q, shapes)
    check_part("log_decay.A_log", decay.A_log, inputs.q, {"[HV]": (heads,)})
    bias = {"[HV]": (heads,)} if decay.logits.ndim == 3 else {"[HV, K]": (heads, channels)}
    check_part("log_decay.dt_bias", decay.dt_bias, inputs.q, bias)
    bound = decay.lower_bound
    if bound is not None and (isinstance(bound, bool) or not bound < 0):
        raise ValueError(f"log_decay.lower_bound must be a number < 0 or None, got {bound!r}")


def check_part(name: str, x: Tensor, q: Tensor, expected: Mapping[str, tuple[int, ...]]) -> None:
    check_dense(name, x)
    check_gate(name, x, q, expected)
