"""The maps from logits to the gates of a step: what they need, and their plain form."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.sequences import computed


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
    return beta_max * torch.sigmoid(computed(logits))


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
