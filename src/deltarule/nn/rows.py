"""Packed documents as rows, for layers that go through a document in blocks of their own."""

from dataclasses import replace

import torch
from torch import Tensor

from deltarule.nn.layout import Layout


def in_rows(x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """[N, L, D] and the layout of documents as rows, padded behind; L is the longest's length."""
    if layout.cu_seqlens is None:
        return x, layout
    # To a compiler any document may be as long as all together.
    unknown = torch.compiler.is_compiling() or not layout.sequences
    tokens = layout.tokens if unknown else int(layout.counts.max())
    token = torch.arange(tokens, device=x.device)
    real = token < layout.counts.unsqueeze(1)
    place = (layout.cu_seqlens[:-1, None] + token).clamp(max=max(layout.tokens - 1, 0))
    rows = x[0, place].masked_fill(~real.unsqueeze(-1), 0)
    alone = replace(
        layout, batch=len(real), tokens=tokens, cu_seqlens=None, sequence=None, real=real
    )
    return rows, alone


def by_token(y: Tensor, layout: Layout) -> Tensor:
    """Lay rows [N, L, D] out as the tokens were: [B, T, D]."""
    if layout.cu_seqlens is None or layout.sequence is None:
        return y
    token = torch.arange(layout.tokens, device=y.device)
    return y[layout.sequence, token - layout.cu_seqlens[layout.sequence]].unsqueeze(0)
