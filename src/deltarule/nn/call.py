"""One call of a layer, as its parts hand it to each other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from deltarule.nn.layout import Layout
from deltarule.nn.linears import linear, linears
from deltarule.nn.state import State
from deltarule.ops.context.rows import LastRows

Factors = Mapping[str, float]
# The convolutions of a layer, and their histories in its state.
CONVOLUTIONS = ("q_conv", "k_conv", "v_conv")


@dataclass
class LayerCall:
    """What a layer was given, what it has projected, and the state that it leaves behind."""

    x: Tensor
    layout: Layout
    before: State
    after: State
    shared: dict[str, Any]
    projected: dict[str, Tensor] = field(default_factory=dict)
    # What was convolved, and how to convolve it again.
    convolved: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)
    # The memory of the gradient by the output gate, beside those by other projections.
    gate_slot: Callable[[Tensor], Tensor] | None = None
    # Convolutions that the product made which made q, k and v.
    within: Any = None
    # Whether `recurrent_step` follows, which makes gates of their logits itself.
    decoding: bool = False
    # Who has the last rows of x on their way to another process, and where those of another come.
    last_rows: tuple[LastRows, Tensor] | None = None

    def keep_convolved(
        self, modules: Sequence[nn.Module], streams: Sequence[Tensor],
        histories: Sequence[Tensor | None], found: Sequence[Tensor], after: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Keep what became of q, k and v, the next histories, and how to convolve again."""
        self.projected.update(zip("qkv", found, strict=True))
        self.after.update(zip(CONVOLUTIONS, after, strict=True))
        layout = self.layout
        for module, x, history, y in zip(modules, streams, histories, found, strict=True):
            if y.requires_grad:
                run = partial(module, x, history, layout)
                self.convolved.append((y, lambda run=run: run()[0]))  # type: ignore[misc]

    def defer(self, gate: nn.Module) -> None:
        """Let an operator project the output gate while its states travel; there is a context."""
        assert self.layout.context is not None

        # Not this call: it holds the context, and would be freed by the garbage collector alone.
        x, projected = self.x, self.projected

        def meanwhile() -> None:
            # Some layers run several operators.
            if "g" not in projected:
                projected["g"] = linear(x, gate)

        context = self.layout.context._replace(meanwhile=meanwhile)
        self.layout = replace(self.layout, context=context)

    def share(self, modules: dict[str, nn.Module], reach: int, factors: Factors) -> None:
        """Let the last rows of x go to the next process, and take the output gate out, for later.

        There is a context; `modules` are about to be applied to x, `factors` to what comes out.
        """
        assert self.layout.context is not None
        if reach:
            last_rows = LastRows(self.layout.context, reach)
            self.x, coming = last_rows.send(self.x)
            self.last_rows = last_rows, coming
        if "g" not in factors and (gate := modules.pop("g", None)) is not None:
            self.defer(gate)

    def ask_before(self, modules: dict[str, nn.Module], factors: Factors) -> None:
        """Take the rows that were sent here, projected, as what comes before q, k and v.

        This is done once: recomputation in the backward does not communicate.
        """
        assert self.last_rows is not None
        last_rows, coming = self.last_rows
        rows = linears(last_rows.receive(coming), [modules[name] for name in "qkv"])
        for name, x in zip("qkv", rows, strict=True):
            before = last_rows.before(x * factors.get(name, 1.0), self.before[f"{name}_conv"])
            self.before = State(self.before, **{f"{name}_conv": before})

    def positions(self) -> Tensor:
        """[B, T] each token's position, counted on in the state's `length` [N]."""
        length = self.layout.lengths(self.before["length"])
        self.after["length"] = length + self.layout.counts
        return self.layout.positions(length)

    def token_shift(self) -> Tensor:
        """x_{t-1} - x_t within each sequence, the state keeping the last x as `shift` [N, 1, D]."""
        history = self.layout.history(self.x, self.before["shift"])
        self.after["shift"] = self.layout.next_history(self.x, history)
        return self.layout.one_back(self.x, history) - self.x
