"""Looking back one token, and at the last one, within each document of a call."""

import torch
from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.ops.context import Context
from deltarule.ops.context.rows import one_of_each, rows_before


def first_tokens(layout: Layout) -> Tensor:
    """[T] True where a document starts."""
    token = torch.arange(layout.tokens, device=layout.device)
    return token == 0 if layout.cu_seqlens is None else torch.isin(token, layout.cu_seqlens[:-1])


def token_before(x: Tensor, layout: Layout) -> Tensor:
    """x_{t-1} within each document, and zeros before its first token: [B, T, ...]."""
    shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    first = first_tokens(layout)
    shifted = shifted.masked_fill(first.view(-1, *[1] * (x.ndim - 2)), 0)
    if (context := layout.context) is None:
        return shifted
    rows = x.flatten(2)
    before = rows_before(context, rows, 1, rows.new_zeros(len(rows), 1, rows.shape[2]))
    return torch.cat([before.view_as(x[:, :1]), shifted[:, 1:]], dim=1)


def per_token(x: Tensor, layout: Layout) -> Tensor:
    """Give each token its document's row of x: [N, D] -> [B, T, D], T perhaps one to broadcast."""
    return x.unsqueeze(1) if layout.sequence is None else x[layout.sequence].unsqueeze(0)


def last_token(x: Tensor, layout: Layout, otherwise: Tensor | None = None) -> Tensor:
    """x at the last real token of each document, [N, ...]; where it has none, otherwise or zero."""
    if otherwise is None:
        otherwise = x.new_zeros(layout.sequences, *x.shape[2:])
    if x.shape[1] == 0:
        return otherwise.clone()
    if layout.real_counts is None:
        # A copy, because a view would keep all tokens alive.
        return x[:, -1].clone()
    counts = layout.real_counts
    if layout.cu_seqlens is not None:
        chosen = x[0, (layout.cu_seqlens[1:] - 1).clamp(min=0)]
    else:
        index = (counts - 1).clamp(min=0).view(-1, *[1] * (x.ndim - 1))
        chosen = torch.take_along_dim(x, index, dim=1).squeeze(1)
    return torch.where((counts == 0).view(-1, *[1] * (chosen.ndim - 1)), otherwise, chosen)


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
    # What comes before the first token here is known: no other process is asked.
    return torch.where(first, start, torch.cat([m[:, :1], m[:, :-1]], dim=1)), m


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
