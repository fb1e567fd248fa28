"""Looking back one token, and at the last one, within each document of a call."""

import torch
from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.ops.context.rows import rows_before


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
