"""The letters, the shapes they make, and the one result type of every operator.

B   batch rows                      T   tokens in a row
n   steps a token (`n_steps`)       N   sequences: B, or len(cu_seqlens) - 1 when packed
H   query and key heads             HV  value heads, a multiple of H
K   channels of a query or key      V   channels of a value

Value head h reads key head h * H // HV. Step j of token t is row t * n + j of k, v and beta.
"""

from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Queries = Float[Tensor, "B T H K"]
Keys = Float[Tensor, "B T*n H K"]
Values = Float[Tensor, "B T*n HV V"]
Beta = Float[Tensor, "B T*n HV"]
Decay = Float[Tensor, "HV"] | Float[Tensor, "B T HV"] | Float[Tensor, "B T HV K"]
Erase = Float[Tensor, "B T HV K"]
State = Float[Tensor, "N HV V K"]
Offsets = Int[Tensor, "N+1"]
Outputs = Float[Tensor, "B T HV V"]
Mask = Bool[Tensor, "B T"]
Hidden = Float[Tensor, "B T D"]


class RecurrentOutput(NamedTuple):
    """The result of every operator: outputs, and the state after each sequence's last token."""

    o: Outputs
    final_state: State | None

    @property
    def transition(self) -> Tensor | None:
        """What all tokens multiply a state by, where it was asked for; see `TransitionOutput`."""
        return None


class TransitionOutput(RecurrentOutput):
    """A `RecurrentOutput` that also has the `transition` of its tokens.

    A state S before the tokens becomes S M plus what they write. M is [N, HV, K, K], or [N, HV, K]
    of a diagonal where nothing is erased.
    """

    def __new__(cls, o: Outputs, final_state: State | None, transition: Tensor) -> Self:
        output = super().__new__(cls, o, final_state)
        output._transition = transition
        return output

    _transition: Tensor

    @property
    def transition(self) -> Tensor:
        """M of each sequence."""
        return self._transition


class MesaState(NamedTuple):
    """The state of `mesa`: decayed sums of beta k k^T and of beta v k^T."""

    covariance: Float[Tensor, "N HV K K"]
    values: State


class MesaOutput(NamedTuple):
    """The result of `mesa`."""

    o: Outputs
    final_state: MesaState | None


class TTTState(NamedTuple):
    """The state of `ttt`; each tuple has one tensor [N, HV, outputs, inputs + 1] a map.

    The last column of a map is its bias. `gradients` sums beta * gradient over the tokens of the
    mini-batch that is not full yet, and `position` [N] counts those tokens.
    """

    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    position: Tensor

    @classmethod
    def start(cls, weights: tuple[Tensor, ...], sequences: int) -> "TTTState":
        """Return the state before the first token: maps [HV, outputs, inputs + 1] for all."""
        return cls(*start_memory(weights, sequences))


class TTTOutput(NamedTuple):
    """The result of `ttt`."""

    o: Outputs
    final_state: TTTState | None


class TitansState(NamedTuple):
    """The state of `titans`; each tuple has one tensor [N, HV, outputs, inputs] a map.

    `anchor` is what `weights` were before the mini-batch that is not full yet, where its gradients
    are taken, and `position` [N] counts its tokens.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    position: Tensor

    @classmethod
    def start(cls, weights: tuple[Tensor, ...], sequences: int) -> "TitansState":
        """Return the state before the first token: maps [HV, outputs, inputs], no momentum."""
        weights, momentum, position = start_memory(weights, sequences)
        return cls(weights, momentum, weights, position)


class TitansOutput(NamedTuple):
    """The result of `titans`."""

    o: Outputs
    final_state: TitansState | None


def start_memory(
    weights: tuple[Tensor, ...], sequences: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """The same maps for every sequence, zeros like them, and positions of 0."""
    started = tuple(w.expand(sequences, *w.shape) for w in weights)
    zeros = tuple(torch.zeros_like(w, memory_format=torch.contiguous_format) for w in started)
    position = torch.zeros(sequences, dtype=torch.int64, device=weights[0].device)
    return started, zeros, position
