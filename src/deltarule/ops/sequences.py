"""What the definitions that run one sequence at a time have in common."""

from itertools import pairwise

import torch
from torch import Tensor

Span = tuple[int, int, int]


def sequences_of(
    x: Tensor, cu_seqlens: Tensor | None = None, lengths: Tensor | None = None
) -> list[Span]:
    """(row, first token, token after the last) of each sequence of x [B, T, ...]."""
    if cu_seqlens is not None:
        return [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    ends = [x.shape[1]] * x.shape[0] if lengths is None else lengths.tolist()
    return [(row, 0, end) for row, end in enumerate(ends)]


def computed(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Widen 16-bit numbers to float32; beside `like`, take the dtype that it is computed in."""
    dtype = (x if like is None else like).dtype
    if x.dtype == dtype == torch.float32:
        return x
    return x.to(torch.promote_types(dtype, torch.float32))


def per_value_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, H, K] -> [B, T, HV, K]: value head h reads key head h * H // HV."""
    return computed(x).repeat_interleave(heads // x.shape[2], dim=2)


def stack_rows(rows: list[list[Tensor]], like: Tensor) -> Tensor:
    """Outputs of each row's tokens -> [B, T, HV, V] like the given tensor, zero after the last."""
    o = [torch.stack(row) if row else like[0, :0] for row in rows]
    padded = [torch.cat([part, torch.zeros_like(like[0, len(part) :])]) for part in o]
    return torch.stack(padded) if padded else like.clone()


def stack_maps(maps: tuple[tuple[Tensor, ...], ...]) -> tuple[Tensor, ...]:
    """The maps of every sequence -> one tensor [N, ...] for each map."""
    return tuple(torch.stack(each) for each in zip(*maps, strict=True))
