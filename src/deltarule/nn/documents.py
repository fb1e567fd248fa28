"""Looking back one token, and at the last one, within each document of a call."""

import torch
from torch import Tensor

from deltarule.nn.rule import Projections
from deltarule.ops.context.rows import rows_before


def first_tokens(projections: Projections) -> Tensor:
    """[T] True where a document starts."""
    token = torch.arange(projections.q.shape[1], device=projections.q.device)
    if projections.cu_seqlens is None:
        return token == 0
    return torch.isin(token, projections.cu_seqlens[:-1])


def token_before(x: Tensor, projections: Projections) -> Tensor:
    """x_{t-1} within each document, and zeros before its first token: [B, T, ...]."""
    shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    first = first_tokens(projections)
    shifted = shifted.masked_fill(first.view(-1, *[1] * (x.ndim - 2)), 0)
    if (context := projections.context) is None:
        return shifted
    rows = x.flatten(2)
    before = rows_before(context, rows, 1, rows.new_zeros(len(rows), 1, rows.shape[2]))
    return torch.cat([before.view_as(x[:, :1]), shifted[:, 1:]], dim=1)


def document_count(projections: Projections) -> int:
    """N: rows, or packed documents."""
    cu_seqlens = projections.cu_seqlens
    return projections.q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def per_token(x: Tensor, projections: Projections) -> Tensor:
    """Give each token its document's row of x: [N, D] -> [B, T, D], T perhaps one to broadcast."""
    if projections.cu_seqlens is None:
        return x.unsqueeze(1)
    token = torch.arange(projections.q.shape[1], device=x.device)
    return x[torch.searchsorted(projections.cu_seqlens[1:], token, right=True)].unsqueeze(0)


def last_token(x: Tensor, projections: Projections, otherwise: Tensor | None = None) -> Tensor:
    """x at the last real token of each document, [N, ...]; where it has none, otherwise or zero."""
    cu_seqlens, real, tokens = projections.cu_seqlens, projections.real, x.shape[1]
    if otherwise is None:
        otherwise = x.new_zeros(document_count(projections), *x.shape[2:])
    if tokens == 0:
        return otherwise.clone()
    if cu_seqlens is None and real is None:
        # A copy, because a view would keep all tokens alive.
        return x[:, -1].clone()
    if cu_seqlens is not None:
        counts, chosen = cu_seqlens.diff(), x[0, (cu_seqlens[1:] - 1).clamp(min=0)]
    else:
        assert real is not None
        counts = real.sum(dim=1)
        index = (counts - 1).clamp(min=0).view(-1, *[1] * (x.ndim - 1))
        chosen = torch.take_along_dim(x, index, dim=1).squeeze(1)
    return torch.where((counts == 0).view(-1, *[1] * (chosen.ndim - 1)), otherwise, chosen)
