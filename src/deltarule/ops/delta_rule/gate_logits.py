"""Logits in place of a step's gates: the arguments and their checks, and the maps to the gates."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.checks import check_dense, check_gate
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments, check_erase
from deltarule.ops.sequences import computed
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


class GateMaps(NamedTuple):
    """What makes gates of the logits that stand in their place; None where the gate itself does.

    A_log and dt_bias go together; lower_bound makes the other of the two maps of a decay.
    """

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    beta_max: float | None = None
    lower_bound: float | None = None

    def applied(self, inputs: Inputs) -> Inputs:
        """The inputs with every gate in its place."""
        beta, decay = inputs.beta, inputs.log_decay
        if beta is not None and self.beta_max is not None:
            beta = write_strength(beta, self.beta_max)
        if decay is not None and self.A_log is not None and self.dt_bias is not None:
            parameters = self.A_log, self.dt_bias
            if self.lower_bound is None:
                decay = step_and_log_decay(decay, *parameters)[1]
            else:
                decay = bounded_log_decay(decay, *parameters, self.lower_bound)
        return inputs._replace(beta=beta, log_decay=decay)


# For a step that is given its gates.
NO_MAPS = GateMaps()


class Step(NamedTuple):
    """A few tokens of many states, written in place; gates that have a map are logits.

    inputs: The tokens, with the logits in their gates' places.
    maps: What is still to be done to these.
    state: The states, or a pool of them.
    slots: Which of them each row has, [N]; or [N, S], a slot for the state after each token. None:
        row i has state i.
    null_index: Rows with it have none, and give zeros.
    states: Where the state after each token goes, [B, T, HV, V, K]. None: nowhere.
    accepted: [N] the slot of which of a row's tokens it starts from, from 1. None: the first.
    out: Where the outputs go, contiguous. With it every index below null_index is null, too.
    """

    inputs: Inputs
    maps: GateMaps
    state: Tensor
    slots: Tensor | None = None
    null_index: int = -1
    states: Tensor | None = None
    accepted: Tensor | None = None
    out: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        others = self.state, self.slots, self.states, self.accepted, self.out
        return *self.inputs[:7], *self.maps[:2], *others


def write_strength(logits: Tensor, beta_max: float) -> Tensor:
    """beta = beta_max * sigmoid(logits)."""
    strength = torch.sigmoid(computed(logits))
    return strength if beta_max == 1 else beta_max * strength


def step_and_log_decay(logits: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """dt = softplus(logits + dt_bias), log_decay = -exp(A_log) * dt, by head or by key channel."""
    dt = F.softplus(computed(logits) + dt_bias)
    rate = computed(A_log).exp()
    return dt, -(rate.unsqueeze(-1) if dt.ndim == 4 else rate) * dt


def bounded_log_decay(logits: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """log_decay = lower_bound * sigmoid(exp(A_log) * (logits + dt_bias)), never below the bound."""
    shifted = computed(logits) + dt_bias
    rate = computed(A_log).exp()
    rate = rate.unsqueeze(-1) if shifted.ndim == 4 else rate
    return lower_bound * torch.sigmoid(rate * shifted)


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
    if isinstance(beta, BetaLogits):
        logits, largest = beta
        check_part("beta.logits", logits, inputs.q, {"[B, T*n, HV]": inputs.v.shape[:3]})
        check_erase(logits, inputs.a, inputs.b, inputs.n_steps, inputs.normalize_qk)
        if isinstance(largest, bool) or not isinstance(largest, int | float | torch.SymFloat):
            raise ValueError(f"beta.beta_max must be a number, got {type(largest).__name__}")
        beta = BetaLogits(logits, float(largest))
    if isinstance(log_decay, DecayLogits):
        logits, A_log, dt_bias, lower_bound = log_decay
        batch, tokens, heads, _ = inputs.output_shape
        channels = inputs.q.shape[3]
        head, channel = (batch, tokens, heads), (batch, tokens, heads, channels)
        shapes = {"[B, T, HV]": head, "[B, T, HV, K]": channel}
        check_part("log_decay.logits", logits, inputs.q, shapes)
        check_part("log_decay.A_log", A_log, inputs.q, {"[HV]": (heads,)})
        # The bias has a channel where the logits have one.
        bias = {"[HV]": (heads,)} if logits.ndim == 3 else {"[HV, K]": (heads, channels)}
        check_part("log_decay.dt_bias", dt_bias, inputs.q, bias)
        if lower_bound is not None and (isinstance(lower_bound, bool) or not lower_bound < 0):
            raise ValueError(
                f"log_decay.lower_bound must be a number < 0 or None, got {lower_bound!r}"
            )
    return apart(inputs, beta, log_decay)


def apart(
    inputs: Inputs, beta: Beta | BetaLogits | None, log_decay: Decay | DecayLogits | None
) -> tuple[Inputs, GateMaps]:
    """The inputs with gates or their logits, and the maps that are still to be done."""
    A_log = dt_bias = beta_max = lower_bound = None
    if isinstance(beta, BetaLogits):
        beta, beta_max = beta
    if isinstance(log_decay, DecayLogits):
        log_decay, A_log, dt_bias, lower_bound = log_decay
    elif log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(inputs.output_shape[:3])
    maps = GateMaps(A_log, dt_bias, beta_max, lower_bound)
    return inputs._replace(beta=beta, log_decay=log_decay), maps


def check_part(name: str, x: Tensor, q: Tensor, expected: Mapping[str, tuple[int, ...]]) -> None:
    check_dense(name, x)
    check_gate(name, x, q, expected)
