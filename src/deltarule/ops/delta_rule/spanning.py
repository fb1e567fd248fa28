"""`delta_rule` and `dplr` over a context: what processes exchange stands between two passes.

    U, M   what the tokens here leave of a zero state, and what they multiply one by
    S      the state that reaches them from the processes before           exchange
    o      the ordinary pass from S

    dS     the gradient by S of what is here
    D      the gradient by the state at the end, from the processes after   exchange
    d...   the ordinary backward with D

No gradient goes through M: what an input does to other processes is in D.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.context import Context
from deltarule.ops.context.exchange import Met, meet, meet_back
from deltarule.ops.context.linear import Operator, with_transition
from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS, Request, backend_of
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments
from deltarule.ops.dispatch import choose, without_autocast
from deltarule.ops.operators import differentiated
from deltarule.shapes import RecurrentOutput

# A function of the tokens here: U and M of their last sequences.
Ends = Callable[[], tuple[Tensor, Tensor]]


class Join:
    """One call's meetings with the other processes.

    Args:
        context: Where the tokens are.
        diagonal: Whether M multiplies channel by channel.
        rows: Batch rows: so many sequences begin before the first token here, and as many end
            after the last one.
    """

    def __init__(self, context: Context, diagonal: bool, rows: int) -> None:
        """Nobody has met yet."""
        self.context, self.diagonal, self.rows = context, diagonal, rows
        self.met: Met | None = None

    def started(self, inputs: Inputs, end: Tensor, transition: Tensor) -> Tensor:
        """The states at the start of all sequences here."""
        if self.context.starts or not self.context.goes_on:
            # A sequence that begins here knows nothing of those before.
            transition = torch.zeros_like(transition)
        self.met = meet(self.context, end, transition, self.diagonal)
        states = inputs.initial_state
        states = end.new_zeros(inputs.state_shape) if states is None else states.clone()
        states[: self.rows] += self.met.start
        return states

    def ended(self, d_final: Tensor, d_start: Tensor) -> Tensor:
        """The gradients by the states at the end of all sequences here."""
        assert self.met is not None
        d_final = d_final.clone()
        d_final[-self.rows :] += meet_back(self.context, d_start, self.met, self.diagonal)
        return d_final


class Passes(NamedTuple):
    """A forward and a backward with a `Join` in the middle of each."""

    # Outputs, final states, what is saved, and the true states at the start.
    forward: Callable[[Inputs, bool, Join, Ends], tuple[Tensor, Tensor, Tensor, Tensor]]
    # d_o, d_final, inputs from the true states, what was saved.
    backward: Callable[[Tensor, Tensor, Inputs, Tensor, Join], tuple[Tensor | None, ...]]


def twice(backend: str) -> Passes:
    """The exchange between two whole passes, with any backend."""
    passes = backend_of(backend)

    def forward(
        inputs: Inputs, save: bool, join: Join, ends: Ends
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        start = join.started(inputs, *ends())
        return *passes.forward(inputs._replace(initial_state=start), save), start

    def backward(
        d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor, join: Join
    ) -> tuple[Tensor | None, ...]:
        d_start = passes.backward(d_o, d_final, inputs, saved)[7]
        assert d_start is not None
        return passes.backward(d_o, join.ended(d_final, d_start[: join.rows]), inputs, saved)

    return Passes(forward, backward)


@cache
def passes_of(backend: str, wide: bool) -> Passes:
    """Those of a backend; `wide`: with more key channels than its kernels join."""
    if backend == "torch" or wide:
        return twice(backend)
    from deltarule.ops.delta_rule.triton import spanning

    return Passes(spanning.forward, spanning.backward)


class _Spanning(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: Passes, join: Join, ends: Ends, save: bool, *fields: Any
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*fields)
        with without_autocast(inputs.q.device):
            o, final, saved, start = passes.forward(inputs, save, join, ends)
        ctx.passes, ctx.join, ctx.rest = passes, join, fields[9:]
        ctx.given_state = inputs.initial_state is not None
        ctx.save_for_backward(saved, *fields[:7], start, inputs.cu_seqlens)
        return o, final

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Any, ...]:
        saved, *tensors = ctx.saved_tensors
        inputs = Inputs(*tensors, *ctx.rest)
        with without_autocast(d_o.device):
            found = ctx.passes.backward(d_o, d_final, inputs, saved, ctx.join)
        *gradients, d_start = found
        d_start = d_start if ctx.given_state else None
        return None, None, None, None, *gradients, d_start, *[None] * (1 + len(ctx.rest))


def beyond(
    operator: Operator, given: dict[str, Any], context: Context | None, return_transition: bool
) -> RecurrentOutput:
    """Run an operator with a context, or with its transition returned, but not with both."""
    if context is None:
        return with_transition(operator, given)
    if return_transition:
        raise ValueError(
            "return_transition must be False with a context, got True: call the operator on the "
            "tokens here without the context for what they multiply a state by"
        )
    return over_context(operator, context, given)


def over_context(operator: Operator, context: Context, given: dict[str, Any]) -> RecurrentOutput:
    """Run an operator on the tokens of this process, after those of the processes before it.

    Args:
        operator: `delta_rule` or `dplr`.
        context: Where the tokens are.
        given: All of its arguments, of the tokens here; the initial state only of sequences that
            begin here.

    Returns:
        The outputs here, and the state after the last token here of each sequence.
    """
    context.check(given["q"].shape[1], "q")
    if given.get("cu_seqlens") is not None:
        raise ValueError("cu_seqlens must be None with a context: make_context takes the offsets")
    given = given | {"cu_seqlens": context.cu_seqlens(given["q"].device)}
    defaults = {"beta": None, "a": None, "b": None, "n_steps": 1, "normalize_qk": False}
    named: dict[str, Any] = {name: given.get(name, defaults.get(name)) for name in Inputs._fields}
    inputs = check_arguments(**named)
    implementation = choose(IMPLEMENTATIONS, Request(inputs), given["impl"], inputs.q.device)
    kernels = implementation in (IMPLEMENTATIONS["triton"], IMPLEMENTATIONS["gluon"])
    passes = passes_of("triton" if kernels else "torch", inputs.q.shape[3] > WIDEST)
    rows = len(inputs.q)

    def ends() -> tuple[Tensor, Tensor]:
        left = with_transition(operator, given | {"return_state": True})
        assert left.final_state is not None
        m = left.transition[-rows:]
        return left.final_state[-rows:], m.unsqueeze(-2) if inputs.erase == "none" else m

    save = given["save_states"] and differentiated(inputs[:8])
    join = Join(context, inputs.erase == "none", rows)
    o, final = _Spanning.apply(passes, join, ends, save, *inputs)  # type: ignore[no-untyped-call]
    return RecurrentOutput(o, final if given["return_state"] else None)


# Key channels up to which the kernels have the transitions of two segments beside each other.
WIDEST = 128
