"""Looking back one token, at the last one, and at all so far, in each document of a call."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.ops.context import Context
from deltarule.ops.context.rows import one_of_each


def token_before(x: Tensor, layout: Layout) -> Tensor:
    """x_{t-1} within each document, and zeros before its first token: [B, T, ...]."""
    zeros = x.new_zeros(layout.sequences, 1, *x.shape[2:])
    return layout.one_back(x, layout.history(x, zeros))


def per_token(x: Tensor, layout: Layout) -> Tensor:
    """Give each token its document's row of x: [N, D] -> [B, T, D], T perhaps one to broadcast."""
    return x.unsqueeze(1) if layout.sequence is None else x[layout.sequence].unsqueeze(0)


def last_token(x: Tensor, layout: Layout, otherwise: Tensor | None = None) -> Tensor:
    """x at the last real token of each document, [N, ...]; where it has none, otherwise or zero."""
    if otherwise is None:
        otherwise = x.new_zeros(layout.sequences, *x.shape[2:])
    return layout.next_history(x, otherwise.unsqueeze(1)).squeeze(1)


def change_of_scale(log_forget: Tensor, log_input: Tensor, before: Tensor, m: Tensor) -> Tensor:
    """log f_t + m_{t-1} - m_t, differentiated by f_t alone."""
    with torch.no_grad():
        # Exactly zero while the maximum only decays: rounding must not pile up over many tokens.
        renewed = log_input >= log_forget + before
        change = torch.where(renewed, (log_forget + before - m).clamp(max=0), 0)
    return change + (log_forget - log_forget.detach())


class Running(NamedTuple):
    """What is kept along each document: m_t = of_two(log f_t + m_{t-1}, log i_t).

    Args:
        of_two: The larger of two, or the logarithm of the sum of two exponentials.
        of_all: The same of all numbers along an axis.
    """

    of_two: Callable[[Tensor, Tensor], Tensor]
    of_all: Callable[[Tensor, int], Tensor]

    def along(
        self, log_forget: Tensor, log_input: Tensor, layout: Layout, start: Tensor | None = None,
        first: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """m_{t-1} and m_t, [B, T, HV], and the last of each document, [N, HV].

        Documents continue from start [N, HV]; None, or on another process: they begin with `first`.
        """
        if start is None:
            start = log_input.new_full((layout.sequences, log_input.shape[2]), first)
        if layout.context is not None:
            start = self.before(layout.context, log_forget, log_input, start, first)
        token, offsets = torch.arange(layout.tokens, device=layout.device), layout.cu_seqlens
        begins = (token == 0 if offsets is None else torch.isin(token, offsets[:-1]))[:, None]
        begun = self.of_two(log_forget + per_token(start, layout), log_input)
        m = torch.where(begins, begun, log_input)
        decay = log_forget.masked_fill(begins, -torch.inf)
        reach = 1
        while reach < m.shape[1]:
            # Twice as far back in every round.
            further = self.of_two(m[:, reach:], m[:, :-reach] + decay[:, reach:])
            m = torch.cat([m[:, :reach], further], dim=1)
            decay = torch.cat([decay[:, :reach], decay[:, reach:] + decay[:, :-reach]], dim=1)
            reach *= 2
        return layout.one_back(m, start.unsqueeze(1)), m, last_token(m, layout, otherwise=start)

    def before(
        self, context: Context, log_forget: Tensor, log_input: Tensor, given: Tensor, first: float
    ) -> Tensor:
        """[N, HV] what each sequence here continues from, given where it begins here.

        m_end = of_two(F + m_start, G) over the tokens of a process, with F = sum log f.
        """
        forget, tail = log_forget[:, context.tail :], log_input[:, context.tail :]
        after = forget.flip(1).cumsum(1).flip(1) - forget
        ends = torch.cat([forget.sum(1), self.of_all(after + tail, 1)], 1)
        total, inputs = one_of_each(context, ends).chunk(2, 2)
        start, others = given.tensor_split([len(ends)])
        if context.goes_on:
            start = torch.full_like(start, first)
            for rank in context.before:
                start = self.of_two(total[:, rank] + start, inputs[:, rank])
        # Every process must reach the exchange of gradients, whether or not it looks back.
        return torch.cat([start + 0 * inputs.sum(), others])


running_log_sum = Running(torch.logaddexp, torch.logsumexp).along
# Without gradients: whatever a maximum is, it cancels in the output.
running_maximum = torch.no_grad()(Running(torch.maximum, torch.amax).along)
