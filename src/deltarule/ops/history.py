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
    number, place = (torch.arange(n, device=x.device) for n in history.shape[:2])
    before = (cu_seqlens[:-1] + number * reach).unsqueeze(1) + place
    # In place and the history first, which is seldom differentiated: x is then copied once.
    rows.index_copy_(1, before.flatten(), history.flatten(0, 1)[None])
    return rows.index_copy_(1, token_rows(sequence, reach), x)


def token_rows(sequence: Tensor, reach: int) -> Tensor:
    """[T] where `with_history` puts each packed token."""
    return torch.arange(len(sequence), device=sequence.device) + (sequence + 1) * reach


def offsets_of(cu_seqlens: Tensor | None, x: Tensor) -> Tensor:
    """Offsets [N + 1] of the rows of x [B, T, ...], as if they lay end to end."""
    if cu_seqlens is not None:
        return cu_seqlens.to(x.device)
    return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]


def sequence_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] which packed sequence each token is of; an empty one has none."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    # Right of equal offsets.
    return torch.searchsorted(cu_seqlens[1:], token.to(cu_seqlens.dtype), right=True)


def last_rows(
    x: Tensor, history: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """[N, R, ..] the last rows of each sequence, those of its history where it is shorter."""
    history, reach, tokens = history.to(x.dtype), history.shape[1], x.shape[1]
    if lengths is None and cu_seqlens is None:
        # A copy, because a view would keep all tokens alive.
        return torch.cat([history[:, tokens:], x[:, max(tokens - reach, 0) :]], dim=1)
    offsets = offsets_of(cu_seqlens, x)[:, None]
    starts, ends = offsets[:-1], offsets[1:]
    ends = ends if lengths is None else starts + lengths[:, None]
    place = ends - reach + torch.arange(reach, device=x.device)
    wide = (..., *[None] * (x.ndim - 2))
    earlier = (place - starts + reach).clamp(max=reach - 1)[wide]
    earlier = torch.take_along_dim(history, earlier, dim=1)
    if x.numel() == 0:
        return earlier
    return torch.where((place >= starts)[wide], x.flatten(0, 1)[place.clamp(min=0)], earlier)
