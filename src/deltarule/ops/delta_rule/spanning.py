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
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.checks import check_flags
from deltarule.ops.context import Context, check_context
from deltarule.ops.context.exchange import Halves, in_two, meet, meet_back
from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS, Request, backend_of
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments
from deltarule.ops.dispatch import choose, without_autocast
from deltarule.ops.history import sequence_of
from deltarule.ops.operators import differentiated
from deltarule.shapes import RecurrentOutput, TransitionOutput

# A recurrence of arguments that are not checked yet; final states included.
Run = Callable[[Inputs], RecurrentOutput]
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
        d_start = passes.backward(d_o, d_final, inputs, saved, False)[7]
        assert d_start is not None
        join.begin_back(d_start[: join.rows])
        yield
        return passes.backward(d_o, join.ended(d_final), inputs, saved, False)

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
    recurrence: Any, tensors: tuple[Any, ...], options: tuple[Any, ...], impl: str, save: bool,
    return_state: bool, context: Context | None, return_transition: bool,
) -> RecurrentOutput:  # fmt: skip
    """A recurrence with a context, or with its transition returned: not with both.

    With a context its tokens come after those of the processes before this one, and the initial
    state is that of sequences that begin here; the state returned is that after the last token
    here of each sequence.
    """

    def run(given: Inputs) -> RecurrentOutput:
        output: RecurrentOutput = recurrence(given[:9], given[9:], impl, save, True)
        return output

    check_flags({"return_state": return_state, "return_transition": return_transition})
    given = Inputs(*tensors, *options)
    if context is None:
        o, final, transition = with_transition(run, given)
        return TransitionOutput(o, final if return_state else None, transition)
    if return_transition:
        raise ValueError(
            "return_transition must be False with a context, got True: call the operator on the "
            "tokens here without the context for what they multiply a state by"
        )
    check_context(context, given.q.shape[1], "q", given.cu_seqlens)
    given = given._replace(cu_seqlens=context.cu_seqlens(given.q.device))
    inputs = check_arguments(given, given.scale)
    implementation = choose(IMPLEMENTATIONS, Request(inputs), impl, inputs.q.device)
    kernels = implementation in (IMPLEMENTATIONS["triton"], IMPLEMENTATIONS["gluon"])
    passes = passes_of("triton" if kernels else "torch", inputs.q.shape[3] > WIDEST)
    rows = len(inputs.q)

    def ends() -> tuple[Tensor, Tensor]:
        _, end, m = with_transition(run, given)
        return end[-rows:], m[-rows:].unsqueeze(-2) if inputs.erase == "none" else m[-rows:]

    join = Join(context, inputs.erase == "none", rows, passes)
    save = save and differentiated(inputs[:8])
    link = _Begin.apply(join, ends, save, *inputs)  # type: ignore[no-untyped-call]
    if context.meanwhile is not None:
        context.meanwhile()
    o, final = _Finish.apply(join, inputs, link)  # type: ignore[no-untyped-call]
    return RecurrentOutput(o, final if return_state else None)


# `delta_rule` and `dplr` with the transition of all their tokens: S before becomes S M + U.
#
# Rows of a state do not see each other. So K more value channels, which write zeros, and whose rows
# of the state start as I, take M through the same pass:
#
#     rows of v        o_t with nothing before      U, the state after the last token
#     rows of I                                     M = A_1 .. A_T
#
# Without an erase M is diagonal, and the exponential of summed decays: no more channels.


def with_transition(run: Run, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, U and M."""
    if given.erase == "none":
        o, final = run(given)
        assert final is not None
        return o, final, total_decay(given).exp()
    key_size, value_size, heads = given.q.shape[-1], given.v.shape[-1], given.v.shape[2]
    dtype, device = torch.promote_types(given.q.dtype, torch.float32), given.v.device
    rows = torch.eye(key_size, dtype=dtype, device=device).expand(given.sequences, heads, -1, -1)
    start = given.initial_state
    if start is None:
        start = rows.new_zeros(given.sequences, heads, value_size, key_size)
    wide = F.pad(given.v, (0, key_size)), torch.cat([start, rows], -2)
    output = run(given._replace(v=wide[0], initial_state=wide[1]))
    assert output.final_state is not None
    return output.o[..., :value_size], *output.final_state.split((value_size, key_size), -2)


def total_decay(given: Inputs) -> Tensor:
    """The sum of the log decays of each sequence, [N, HV, K]; zeros where there is none."""
    q, decay, offsets = given.q, given.log_decay, given.cu_seqlens
    dtype = torch.promote_types(q.dtype, torch.float32)
    decay = q.new_zeros((), dtype=dtype) if decay is None else decay.to(dtype)
    if 0 < decay.ndim < 4:
        decay = decay.unsqueeze(-1)
    decay = decay.expand(*q.shape[:2], given.v.shape[2], q.shape[3])
    if offsets is None:
        return decay.sum(1)
    # Not by differences of running sums: a reset is -inf.
    sums = decay.new_zeros(given.sequences, *decay.shape[2:])
    return sums.index_add(0, sequence_of(offsets.to(q.device), q.shape[1]), decay[0])


# Key channels up to which the kernels have the transitions of two segments beside each other.
WIDEST = 128
