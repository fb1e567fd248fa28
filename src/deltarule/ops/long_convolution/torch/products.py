"""Convolutions of outer products k v^T, read by q, as masked products of T x T scores in rows.

o = (Q K^T * W) V        W_{t,s} = taps_{t-s} for 0 <= t - s < L, and zero elsewhere

An FFT would go over K V channels a head, and costs more up to some 10^5 tokens. Rows of 128 tokens
at a time see what is behind them; memory is linear in T.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.long_convolution.torch.halves import diagonals

ROWS = 128
Rows = tuple[slice, slice, Tensor]


def weights(taps: Tensor, tokens: int, sequence: Tensor | None) -> Iterator[tuple[Rows, Tensor]]:
    """For rows of tokens: the rows, the tokens they see, the lags, and W [H, rows, seen]."""
    token = torch.arange(tokens, device=taps.device)
    for start in range(0, tokens, ROWS):
        rows = slice(start, min(start + ROWS, tokens))
        seen = slice(max(0, start - taps.shape[1] + 1), rows.stop)
        lag = token[rows, None] - token[seen]
        there = (lag >= 0) & (lag < taps.shape[1])
        if sequence is not None:
            there = there & (sequence[rows, None] == sequence[seen])
        yield (rows, seen, there), torch.where(there, taps[:, lag.clamp(0, taps.shape[1] - 1)], 0)


def convolve(q: Tensor, k: Tensor, v: Tensor, taps: Tensor, sequence: Tensor | None) -> Tensor:
    """q, k [B, H, T, K], v [B, H, T, V] -> o [B, H, T, V]."""
    outputs = [v[:, :, :0]]
    for (rows, seen, _), weight in weights(taps, v.shape[2], sequence):
        scores = q[:, :, rows] @ k[:, :, seen].mT * weight
        outputs.append(scores @ v[:, :, seen])
    return torch.cat(outputs, dim=2)


def gradients(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, taps: Tensor, sequence: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by q, k, v and the taps."""
    d_q, d_k, d_v = [q[:, :, :0]], torch.zeros_like(k), torch.zeros_like(v)
    d_taps = torch.zeros_like(taps)
    for (rows, seen, there), weight in weights(taps, v.shape[2], sequence):
        products, d_rows = q[:, :, rows] @ k[:, :, seen].mT, d_o[:, :, rows]
        d_scores = d_rows @ v[:, :, seen].mT
        behind = (0, 0, seen.start, v.shape[2] - seen.stop)
        d_v = d_v + F.pad((products * weight).mT @ d_rows, behind)
        d_products = d_scores * weight
        d_q.append(d_products @ k[:, :, seen])
        d_k = d_k + F.pad(d_products.mT @ q[:, :, rows], behind)
        by_lag = torch.where(there, (d_scores * products).sum(0), 0)
        # Before lag 0 come the tokens after a row, which it does not see.
        by_lag = diagonals(by_lag)[:, by_lag.shape[1] - 1 :][:, : taps.shape[1]]
        d_taps = d_taps + F.pad(by_lag, (0, taps.shape[1] - by_lag.shape[1]))
    return torch.cat(d_q, dim=2), d_k, d_v, d_taps
