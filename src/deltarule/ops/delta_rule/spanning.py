"""`delta_rule` and `dplr` over a context: what processes exchange stands between two passes.

    U, M   what the tokens here leave of a zero state, and what they multiply one by
    S      the state that reaches them from the processes before           exchange
    o      the ordinary pass from S

    dS     the gradient by S of what is here
    D      the gradient by the state at the end, from the processes after   exchange
    d...   the ordinary backward with D

No gradient goes through M: what an input does to other processes is in D. Each pass is two nodes of
autograd, one up to where messages leave and one from where they have come: what a caller computes
between the two forwards runs between them backwards, too.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.context import Context, check_context
from deltarule.ops.context.exchange import Halves, in_two, meet, meet_back
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
        passes: The `Passes` that meet.
    """

    def __init__(self, context: Context, diagonal: bool, rows: int, passes: Any = None) -> None:
        self.context, self.diagonal = context.alone, diagonal
        self.rows, self.passes = rows, passes
        # The second half of a pass, once the first one has run.
        self.halves: list[Callable[[], Any]] = []

    def begin(self, end: Tensor, transition: Tensor) -> None:
        """Send U and M of the last sequences here."""
        if self.context.starts or not self.context.goes_on:
            # A sequence that begins here knows nothing of those before.
            transition = torch.zeros_like(transition)
        self.coming = meet(self.context, end, transition, self.diagonal)

    def started(self, inputs: Inputs) -> Tensor:
        """The states at the start of all sequences here."""
        self.met = self.coming()
        states, start = inputs.initial_state, self.met.start
        states = start.new_zeros(inputs.state_shape) if states is None else states.clone()
        states[: self.rows] += start
        return states

    def begin_back(self, d_start: Tensor) -> None:
        """Send the gradients by the states before the first sequences here."""
        self.coming_back = meet_back(self.context, d_start, self.met, self.diagonal)

    def ended(self, d_final: Tensor) -> Tensor:
        """The gradients by the states at the end of all sequences here."""
        d_final = d_final.clone()
        d_final[-self.rows :] += self.coming_back()
        return d_final


Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor | None, ...]


class Passes(NamedTuple):
    """A forward and a backward `in_two`, with a `Join` in the middle of each."""

    # Outputs, final states, what is saved, and the true states at the start.
    forward: Callable[[Inputs, bool, Join, Ends], Callable[[], Outputs]]
    # d_o, d_final, inputs from the true states, what was saved.
    backward: Callable[[Tensor, Tensor, Inputs, Tensor, Join], Callable[[], Gradients]]


def twice(backend: str) -> Passes:
    """The exchange between two whole passes, with any backend."""
    passes = backend_of(backend)

    @in_two
    def forward(inputs: Inputs, save: bool, join: Join, ends: Ends) -> Halves[Outputs]:
        join.begin(*ends())
        yield
        start = join.started(inputs)
        return *passes.forward(inputs._replace(initial_state=start), save), start

    @in_two
    def backward(
        d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor, join: Join
    ) -> Halves[Gradients]:
        d_start = passes.backward(d_o, d_final, inputs, saved)[7]
        assert d_start is not None
        join.begin_back(d_start[: join.rows])
        yield
        return passes.backward(d_o, join.ended(d_final), inputs, saved)

    return Passes(forward, backward)


@cache
def passes_of(backend: str, wide: bool) -> Passes:
    """Passes of a backend; `wide`: with more key channels than its kernels take for segments."""
    if backend == "torch" or wide:
        return twice(backend)
    from deltarule.ops.delta_rule.triton import spanning

    return Passes(spanning.forward, spanning.backward)


class _Begin(torch.autograd.Function):
    """The first half of a forward, and the second one of its backward."""

    @staticmethod
    def forward(ctx: Any, join: Join, ends: Ends, save: bool, *fields: Any) -> Tensor:
        inputs = Inputs(*fields)
        with without_autocast(inputs.q.device):
            join.halves.append(join.passes.forward(inputs, save, join, ends))
        ctx.join, ctx.given_state = join, inputs.initial_state is not None
        return inputs.q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, d_link: Tensor) -> tuple[Any, ...]:
        with without_autocast(d_link.device):
            *gradients, d_start = ctx.join.halves.pop()()
        d_start = d_start if ctx.given_state else None
        return *[None] * 3, *gradients, d_start, *[None] * (len(Inputs._fields) - 8)


class _Finish(torch.autograd.Function):
    """The second half of a forward, and the first one of its backward."""

    @staticmethod
    def forward(ctx: Any, join: Join, inputs: Inputs, link: Tensor) -> tuple[Tensor, Tensor]:
        with without_autocast(link.device):
            o, final, saved, start = join.halves.pop()()
        ctx.join, ctx.rest = join, inputs[9:]
        ctx.save_for_backward(saved, *inputs[:7], start, inputs.cu_seqlens)
        return o, final

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Any, ...]:
        saved, *tensors = ctx.saved_tensors
        inputs, join = Inputs(*tensors, *ctx.rest), ctx.join
        with without_autocast(d_o.device):
            join.halves.append(join.passes.backward(d_o, d_final, inputs, saved, join))
        return None, None, inputs.q.new_empty(0)


def beyond(
    operator: Operator, given: dict[str, Any], context: Context | None, return_transition: bool
) -> RecurrentOutput:
    """Run `delta_rule` or `dplr` with a context, or with its transition returned: not with both.

    `given` has all arguments. With a context they are those of the tokens here, after those of the
    processes before this one, and the initial state is that of sequences that begin here; the
    state returned is that after the last token here of each sequence.
    """
    if context is None:
        return with_transition(operator, given)
    if return_transition:
        raise ValueError(
            "return_transition must be False with a context, got True: call the operator on the "
            "tokens here without the context for what they multiply a state by"
        )
    check_context(context, given["q"].shape[1], "q", given.get("cu_seqlens"))
    given = given | {"cu_seqlens": context.cu_seqlens(given["q"].device)}
    named = {name: given[name] for name in Inputs._fields if name in given}
    inputs = check_arguments(Inputs(**named), given["scale"])
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
    join = Join(context, inputs.erase == "none", rows, passes)
    link = _Begin.apply(join, ends, save, *inputs)  # type: ignore[no-untyped-call]
    if context.meanwhile is not None:
        context.meanwhile()
    o, final = _Finish.apply(join, inputs, link)  # type: ignore[no-untyped-call]
    return RecurrentOutput(o, final if given["return_state"] else None)


# Key channels up to which the kernels have the transitions of two segments beside each other.
WIDEST = 128
