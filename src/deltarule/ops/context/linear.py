"""`delta_rule` and `dplr` over a context, or with the transition of all their tokens.

Rows of a state do not see each other. So K more value channels, which write zeros, and whose rows
of the state start as I, turn one pass over the tokens into all there is to know of them:

    rows of v        o_t with nothing before      U, the state after the last token
    rows of I        P_t = scale A_1 .. A_t q_t   M = A_1 .. A_T

    o_t + S P_t      S M + U                      with S the state before the first token

Without an erase A is diagonal, and P and M are exponentials of summed decays: no more channels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.context.context import Context
from deltarule.ops.context.exchange import applied, starting_state
from deltarule.shapes import Outputs, RecurrentOutput, State, TransitionOutput

# An operator with all but its tensors and states given.
Operator = Callable[..., RecurrentOutput]


class Pass(NamedTuple):
    """One pass over the tokens here.

    Args:
        o: [B, T, HV, V] what is read with nothing before.
        reads: [B, T, HV, K] P, what each token reads of a row of the state before.
        final_state: [N, HV, V, K] U of each sequence.
        transition: M of each sequence, [N, HV, K, K], or [N, HV, 1, K] where it is diagonal.
    """

    o: Outputs
    reads: Tensor
    final_state: State
    transition: Tensor

    @property
    def diagonal(self) -> bool:
        """Whether a transition multiplies a state channel by channel."""
        return self.transition.shape[-2] == 1 != self.transition.shape[-1]


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


def with_transition(operator: Operator, given: dict[str, Any]) -> TransitionOutput:
    """Run an operator, and find what its tokens multiply a state by."""
    if erases(given):
        whole = augmented(operator, given, all_carried(given))
        state = whole.final_state if given["return_state"] else None
        return TransitionOutput(whole.o, state, whole.transition)
    return TransitionOutput(*operator(**given), total_decay(given).exp())


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
    first = len(given["q"])
    here = (augmented if erases(given) else decayed)(operator, given, carried_on(context, given))
    end, transition = here.final_state[-first:], here.transition[-first:]
    start = starting_state(context, end, transition, diagonal=here.diagonal)
    moved = applied(start, here.transition[:first], here.diagonal)
    states = torch.cat([here.final_state[:first] + moved, here.final_state[first:]])
    o = added(here.o, here.reads, start)
    return RecurrentOutput(o, states if given.get("return_state", True) else None)


def erases(given: dict[str, Any]) -> bool:
    """Whether a token multiplies the state by more than a diagonal."""
    return given.get("beta") is not None or given.get("a") is not None


def added(o: Tensor, reads: Tensor, start: Tensor) -> Tensor:
    """o_t + S P_t, rounded once."""
    batch, tokens, heads, _ = o.shape
    sums = torch.baddbmm(
        o.transpose(1, 2).reshape(batch * heads, tokens, -1),
        reads.transpose(1, 2).reshape(batch * heads, tokens, -1),
        start.to(o.dtype).flatten(0, 1).mT,
    )
    return sums.view(batch, heads, tokens, -1).transpose(1, 2)


def augmented(operator: Operator, given: dict[str, Any], carried: Tensor) -> Pass:
    """One pass with K more value channels, whose rows of states start as carried [N] times I."""
    q, v = given["q"], given["v"]
    key_size, value_size, heads = q.shape[-1], v.shape[-1], v.shape[2]
    identity = torch.eye(key_size, dtype=carried.dtype, device=v.device)
    rows = (carried[:, None, None, None] * identity).expand(-1, heads, -1, -1)
    start = given.get("initial_state")
    if start is None:
        start = rows.new_zeros(len(carried), heads, value_size, key_size)
    output = operator(
        **given | {"v": F.pad(v, (0, key_size)), "initial_state": torch.cat([start, rows], -2)}
        | {"return_state": True}
    )  # fmt: skip
    assert output.final_state is not None
    sizes = value_size, key_size
    o, reads = output.o.split(sizes, -1)
    return Pass(o, reads, *output.final_state.split(sizes, -2))


def decayed(operator: Operator, given: dict[str, Any], carried: Tensor) -> Pass:
    """One pass without an erase: what a token reads of a state before is its decayed query."""
    q, v = given["q"], given["v"]
    output = operator(**given | {"return_state": True})
    assert output.final_state is not None
    wide = q.to(carried.dtype)
    if given.get("normalize_qk"):
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
    scale = given.get("scale")
    scaled = wide * (q.shape[-1] ** -0.5 if scale is None else scale)
    summed = each_token(given).cumsum(1)
    reads = scaled.repeat_interleave(v.shape[2] // q.shape[2], 2) * summed.exp()
    here = sequence_of(given)
    # Only the first sequence here can have a state before it.
    seen = carried[0] * (here == 0) if given.get("cu_seqlens") is not None else carried[0]
    reads = reads * torch.as_tensor(seen, device=v.device).view(1, -1, 1, 1)
    transition = (total_decay(given).exp() * carried[:, None, None]).unsqueeze(-2)
    return Pass(output.o, reads.to(v.dtype), output.final_state, transition)


def each_token(given: dict[str, Any]) -> Tensor:
    """The log decay of every token and key channel, [B, T, HV, K]; zeros where there is none."""
    q, heads, decay = given["q"], given["v"].shape[2], given.get("log_decay")
    batch, tokens, _, key_size = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    if decay is None:
        return q.new_zeros(batch, tokens, heads, key_size, dtype=dtype)
    if decay.ndim < 4:
        decay = decay.unsqueeze(-1)
    return decay.to(dtype).expand(batch, tokens, heads, key_size)


def total_decay(given: dict[str, Any]) -> Tensor:
    """The sum of the log decays of each sequence, [N, HV, K]."""
    decay = each_token(given)
    offsets = given.get("cu_seqlens")
    if offsets is None:
        return decay.sum(1)
    # Not by differences of running sums: a reset is -inf.
    sums = decay.new_zeros(len(offsets) - 1, *decay.shape[2:])
    return sums.index_add(0, sequence_of(given), decay[0])


def sequence_of(given: dict[str, Any]) -> Tensor:
    """[T] the packed sequence of each token; zeros unpacked."""
    q, offsets = given["q"], given.get("cu_seqlens")
    place = torch.arange(q.shape[1], device=q.device)
    if offsets is None:
        return torch.zeros_like(place)
    return torch.searchsorted(offsets[1:].to(q.device, torch.int64), place, right=True)


def all_carried(given: dict[str, Any]) -> Tensor:
    """[N] ones."""
    q, offsets = given["q"], given.get("cu_seqlens")
    count = q.shape[0] if offsets is None else len(offsets) - 1
    return q.new_ones(count, dtype=torch.promote_types(q.dtype, torch.float32))


def carried_on(context: Context, given: dict[str, Any]) -> Tensor:
    """[N] one for sequences that go on from the process before, zero for the others."""
    carried = torch.zeros_like(all_carried(given))
    carried[: len(given["q"])] = float(context.goes_on)
    return carried
