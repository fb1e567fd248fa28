"""What a convolution remembers: the last L - 1 keys and values of each sequence."""

import torch
from torch import Tensor


def with_history(x: Tensor, history: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Put before each sequence its rows [N, R, H, C]: [B, R + T, ..] or packed [1, T + N R, ..]."""
    history = history.to(x.dtype)
    if cu_seqlens is None:
        return torch.cat([history, x], dim=1)
    place = torch.arange(history.shape[1], device=x.device)
    first = extended_offsets(cu_seqlens, history.shape[1])[:-1]
    rows = x.new_zeros(1, x.shape[1] + history.shape[0] * history.shape[1], *x.shape[2:])
    rows = rows.index_copy(1, (first[:, None] + place).flatten(), history.flatten(0, 1)[None])
    return rows.index_copy(1, places(x, history, cu_seqlens), x)


def extended_offsets(cu_seqlens: Tensor, reach: int) -> Tensor:
    """Offsets of sequences that each begin with R rows more."""
    return cu_seqlens + reach * torch.arange(len(cu_seqlens), device=cu_seqlens.device)


def places(x: Tensor, history: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] where `with_history` puts each packed token."""
    token = torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    return token + (sequence + 1) * history.shape[1]


def without_history(o: Tensor, x: Tensor, history: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Pick the tokens of x from what was computed on the rows of `with_history`."""
    if cu_seqlens is None:
        return o[:, history.shape[1] :]
    return o.index_select(1, places(x, history, cu_seqlens))


def last_rows(
    written: Tensor, history: Tensor | None, reach: int, lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:  # fmt: skip
    """[N, R, H, C] the last rows of each sequence, those of its history where it is shorter."""
    device = written.device
    if cu_seqlens is not None:
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    else:
        starts = torch.arange(written.shape[0], device=device) * written.shape[1]
        ends = starts + (written.shape[1] if lengths is None else lengths)
    place = ends[:, None] - reach + torch.arange(reach, device=device)
    own = (place >= starts[:, None])[..., None, None]
    rows = written.flatten(0, 1)
    found = rows[place.clamp(min=0)] if len(rows) else rows.new_zeros(*place.shape, *rows.shape[1:])
    if history is None:
        return torch.where(own, found, 0)
    earlier = (place - starts[:, None] + reach).clamp(max=reach - 1)[..., None, None]
    return torch.where(own, found, torch.take_along_dim(history, earlier, dim=1))
