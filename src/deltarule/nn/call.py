"""One call of a recurrent layer, as its parts hand it to each other."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.nn.state import State


@dataclass
class Call:
    """What a layer was given, what it has projected, and the state that it leaves behind."""

    x: Tensor
    layout: Layout
    before: State
    after: State
    shared: dict[str, Tensor]
    projected: dict[str, Tensor] = field(default_factory=dict)
    # The convolved values, and how to convolve them again.
    values: tuple[Tensor, Callable[[], Tensor]] | None = None

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
