"""What convolutions remember: the last R inputs of each sequence, in rows before its tokens.

Packed sequences lie end to end with their histories, [1, T + N R, ..]; others side by side.
"""

import torch
from torch import Tensor


def with_history(
    x: Tensor, history: Tensor, cu_seqlens: Tensor | None, sequence: Tensor | None
) -> Tensor:
    """Put before each sequence its rows [N, R, ..]: [B, R + T, ..] or packed [1, T + N R, ..]."""
    history = history.to(x.dtype)
    if cu_seqlens is None or sequence is None:
        return torch.cat([history, x], dim=1)
    reach, more = history.shape[1], history.shape[0] * history.shape[1]
    rows = x.new_zeros(1, x.shape[1] + more, *x.shape[2:])
    # In place and the history first, which is seldom differentiated: x is then copied once.
    rows.index_copy_(1, history_rows(cu_seqlens[:-1], reach).flatten(), history.flatten(0, 1)[None])
    return rows.index_copy_(1, token_rows(sequence, reach), x)


def token_rows(sequence: Tensor, reach: int) -> Tensor:
    """[T] where `with_history` puts each packed token."""
    return torch.arange(len(sequence), device=sequence.device) + (sequence + 1) * reach


def history_rows(offsets: Tensor, reach: int) -> Tensor:
    """[N, R] the rows before the packed token at offsets [N], were it in the next sequence."""
    sequence, place = (torch.arange(n, device=offsets.device) for n in (len(offsets), reach))
    return (offsets + sequence * reach).unsqueeze(1) + place


def sequence_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] which packed sequence each token is of; an empty one has none."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    # Right of equal offsets.
    return torch.searchsorted(cu_seqlens[1:], token.to(cu_seqlens.dtype), right=True)


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
