"""Exponential inputs in range: the state is kept times e^{-m_t}, m_t a maximum that cancels.

m_t = max(log f_t + m_{t-1}, log i_t)
"""

import torch
from torch import Tensor

from deltarule.nn.documents import first_tokens, per_token, token_before
from deltarule.nn.layout import Layout
from deltarule.ops.context import Context
from deltarule.ops.context.rows import one_of_each


def change_of_scale(log_forget: Tensor, log_input: Tensor, before: Tensor, m: Tensor) -> Tensor:
    """log f_t + m_{t-1} - m_t, differentiated by f_t alone."""
    with torch.no_grad():
        # Exactly zero while the maximum only decays: rounding must not pile up over many tokens.
        renewed = log_input >= log_forget + before
        change = torch.where(renewed, (log_forget + before - m).clamp(max=0), 0)
    return change + (log_forget - log_forget.detach())


@torch.no_grad()
def running_maximum(
    log_forget: Tensor, log_input: Tensor, layout: Layout, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """m_{t-1} and m_t, [B, T, HV], reaching twice as far back in every round.

    Without gradients: whatever m is, it cancels in the output. Documents continue from start [N,
    HV], None: from zero.
    """
    if start is None:
        start = log_input.new_zeros(layout.sequences, log_input.shape[2])
    first = first_tokens(layout).view(1, -1, 1)
    start = per_token(start, layout)
    m = torch.where(first, torch.maximum(log_forget + start, log_input), log_input)
    decay = log_forget.masked_fill(first, -torch.inf)
    reach, tokens = 1, m.shape[1]
    while reach < tokens:
        further = torch.maximum(m[:, reach:], m[:, :-reach] + decay[:, reach:])
        m = torch.cat([m[:, :reach], further], dim=1)
        decay = torch.cat([decay[:, :reach], decay[:, reach:] + decay[:, :-reach]], dim=1)
        reach *= 2
    return torch.where(first, start, token_before(m, layout)), m


@torch.no_grad()
def maximum_before(
    context: Context, log_forget: Tensor, log_input: Tensor, given: Tensor, first: float = 0.0
) -> Tensor:
    """[N, HV] the maximum that each sequence here continues from, given where it begins here.

    On other processes it begins with `first`.

    m_end = max(F + m_start, G) over the tokens of a process, with F = sum log f.
    """
    forget, tail = log_forget[:, context.tail :], log_input[:, context.tail :]
    after = forget.flip(1).cumsum(1).flip(1) - forget
    ends = one_of_each(context, torch.cat([forget.sum(1), (after + tail).amax(1)], 1))
    total, largest = ends.chunk(2, 2)
    start = given[: len(ends)]
    if context.goes_on:
        start = torch.full_like(start, first)
        for rank in context.before:
            start = torch.maximum(total[:, rank] + start, largest[:, rank])
    return torch.cat([start, given[len(ends) :]])
