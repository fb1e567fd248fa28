"""One call of a layer, as its parts hand it to each other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.nn.state import State


@dataclass
class LayerCall:
    """What a layer was given, what it has projected, and the state that it leaves behind."""

    x: Tensor
    layout: Layout
    before: State
    after: State
    shared: dict[str, Any]
    projected: dict[str, Tensor] = field(default_factory=dict)
    # The convolved values, and how to convolve them again.
    values: tuple[Tensor, Callable[[], Tensor]] | None = None
    # Whether `recurrent_step` follows, which makes gates of their logits itself.
    decoding: bool = False

    def ask_before(self, streams: dict[str, Tensor]) -> None:
        """Take what comes before these streams from other processes, in one message.

        Once: what is computed again in the backward asks nobody.
        """
        if self.layout.context is not None:
            given = [self.before[name] for name in streams]
            reach, sizes = given[0].shape[1], [x.shape[2] for x in given]
            last = torch.cat([x[:, x.shape[1] - reach :] for x in streams.values()], dim=2)
            rows = self.layout.history(last, torch.cat(given, dim=2).to(last.dtype))
            histories = zip(streams, rows.split(sizes, 2), strict=True)
            self.before = State(self.before, **dict(histories))

    def positions(self) -> Tensor:
        """[B, T] each token's position, counted on in the state's `length` [N]."""
        length = self.layout.lengths(self.before["length"])
        self.after["length"] = length + self.layout.counts
        return self.layout.positions(length)

    def token_shift(self) -> Tensor:
        """x_{t-1} - x_t within each sequence, the state keeping the last x as `shift` [N, 1, D]."""
        history = self.layout.history(self.x, self.before["shift"])
        extended = self.layout.with_history(self.x, history)
        self.after["shift"] = self.layout.next_history(extended, 1)
        return self.layout.without_history(extended[:, :-1], 1) - self.x
