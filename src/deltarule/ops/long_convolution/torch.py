"""`long_convolution` in PyTorch: halves by FFT, products for wide keys, and the operator of both.

    y_t = sum_{j=0..L-1} taps_j x_{t-j}                    x = k * v, o = q * y, one channel a key
    o = (Q K^T * W) V        W_{t,s} = taps_{t-s} for 0 <= t - s < L, and zero elsewhere

By halves of halves, the long ones by FFT: a token of the right half of a block of 2 s sees the left
half, and never the reverse: what a token is changes no bit of an earlier output, as it would in one
FFT over all of them. Blocks of 2, 4, .. tokens cover all pairs. Exactly one packed sequence crosses
the middle of a block: the others are masked there, and packing costs nothing else.

Outer products k v^T, read by q, are masked products of T x T scores in rows: an FFT would go over
K V channels a head, and costs more up to some 10^5 tokens. Rows of 128 tokens at a time see what is
behind them; memory is linear in T.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.history import sequence_of
from deltarule.ops.long_convolution.inputs import ConvolutionInputs
from deltarule.ops.operators import Operator
from deltarule.ops.registration import Backward, Gradients, Rules

# Below this many tokens of a half, a product with the matrix of the taps is less than an FFT.
PRODUCT = 32
LEFT, RIGHT = 0, 1
# Tokens of which the scores are there at once.
ROWS = 128
Rows = tuple[slice, slice, Tensor]


class Halves(NamedTuple):
    """All blocks of 2 s tokens, of which the last and the first m of the halves see each other."""

    s: int
    m: int
    blocks: int
    inside: tuple[Tensor, Tensor] | None  # [blocks, m] of the crossing sequence, left and right

    def cut(self, x: Tensor, side: int) -> Tensor:
        """[H, R, T] -> [H, R, blocks, m], zero where the token is of another sequence."""
        padded = F.pad(x, (0, self.blocks * 2 * self.s - x.shape[-1]))
        found = padded.unflatten(-1, (self.blocks, 2 * self.s))
        return self.masked(found.narrow(-1, self.start(side), self.m), side)

    def place(self, y: Tensor, side: int, tokens: int) -> Tensor:
        """[H, R, blocks, m] -> [H, R, T], zero elsewhere."""
        start = self.start(side)
        filled = F.pad(self.masked(y, side), (start, 2 * self.s - self.m - start))
        return filled.flatten(-2)[..., :tokens]

    def start(self, side: int) -> int:
        return self.s - self.m if side == LEFT else self.s

    def masked(self, x: Tensor, side: int) -> Tensor:
        return x if self.inside is None else torch.where(self.inside[side], x, 0)


def levels(tokens: int, taps: int, sequence: Tensor | None) -> Iterator[Halves]:
    """Blocks of 2, 4, .. tokens; what is further back than the taps reach is left out."""
    s, reach = 1, 1 << max(taps - 2, 0).bit_length()
    while s < tokens and taps > 1:
        m, blocks = min(s, reach), -(-tokens // (2 * s))
        inside = None
        if sequence is not None:
            # Which tokens next to each middle belong to the sequence of the token behind it.
            padded = F.pad(sequence, (0, blocks * 2 * s - tokens), value=-1).view(blocks, 2 * s)
            middle = padded[:, s : s + 1]
            inside = padded[:, s - m : s] == middle, padded[:, s : s + m] == middle
        yield Halves(s, m, blocks, inside)
        s *= 2


def by_halves(x: Tensor, taps: Tensor, sequence: Tensor | None) -> Tensor:
    """Convolve x [H, R, T] with taps [H, L]; sequence [T] numbers packed ones."""
    tokens = x.shape[-1]
    y = taps[:, :1, None] * x
    # Some libraries refuse to transform nothing.
    for half in levels(tokens, taps.shape[1], sequence) if x.numel() else ():
        left = half.cut(x, LEFT)
        if half.m < PRODUCT:
            found = torch.matmul(left.flatten(1, 2), toeplitz(taps, half.m).mT).view(left.shape)
        else:
            spectrum = torch.fft.rfft(left, 2 * half.m)
            found = torch.fft.irfft(spectrum * filters(taps, half.m), 2 * half.m)[..., half.m :]
        y = y + half.place(found, RIGHT, tokens)
    return y


def halves_gradients(
    d_y: Tensor, x: Tensor, taps: Tensor, sequence: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens, size = x.shape[-1], taps.shape[1]
    d_x, d_taps = taps[:, :1, None] * d_y, F.pad((d_y * x).sum((1, 2)).unsqueeze(1), (0, size - 1))
    for half in levels(tokens, size, sequence) if x.numel() else ():
        m, left, d_right = half.m, half.cut(x, LEFT), half.cut(d_y, RIGHT)
        if m < PRODUCT:
            d_flat = d_right.flatten(1, 2)
            d_left = torch.matmul(d_flat, toeplitz(taps, m)).view(left.shape)
            d_filter = diagonals(d_flat.mT @ left.flatten(1, 2))
        else:
            # The right half lies behind the left one: the same places as in the forward.
            d_spectrum = torch.fft.rfft(F.pad(d_right, (m, 0)), 2 * m)
            # Under a dispatch mode, as a counter of operations is one, PyTorch forgets inside an
            # operator that `conj` returned a view still to be conjugated: only values count.
            spectrum = torch.conj_physical(filters(taps, m))
            d_left = torch.fft.irfft(d_spectrum * spectrum, 2 * m)[..., :m]
            of_left = torch.conj_physical(torch.fft.rfft(left, 2 * m))
            d_filter = torch.fft.irfft((d_spectrum * of_left).sum((1, 2)), 2 * m)[:, 1:]
        d_x = d_x + half.place(d_left, LEFT, tokens)
        d_taps = d_taps + F.pad(d_filter[:, : size - 1], (1, max(size - 2 * m, 0)))
    return d_x, d_taps


def toeplitz(taps: Tensor, m: int) -> Tensor:
    """[H, L] -> [H, m, m]: what the left half's token j gives to the right half's token i."""
    place = torch.arange(m, device=taps.device)
    lag = m + place[:, None] - place
    return F.pad(taps, (0, max(2 * m - taps.shape[1], 0)))[:, lag]


def filters(taps: Tensor, m: int) -> Tensor:
    """Spectra of the first 2 m taps, [H, 1, 1, m + 1]."""
    return torch.fft.rfft(taps[:, : 2 * m], 2 * m)[:, None, None]


def diagonals(x: Tensor) -> Tensor:
    """Sum [H, R, S] over equal i - j, from 1 - S to R - 1: [H, R + S - 1]."""
    rows, columns = x.shape[1:]
    width = rows + columns - 1
    # Each row one place further to the right: a diagonal becomes a column.
    skewed = F.pad(x.flip(-1), (0, rows)).flatten(1)[:, : rows * width]
    return skewed.unflatten(1, (rows, width)).sum(1)


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


def by_products(q: Tensor, k: Tensor, v: Tensor, taps: Tensor, sequence: Tensor | None) -> Tensor:
    """q, k [B, H, T, K], v [B, H, T, V] -> o [B, H, T, V]."""
    outputs = [v[:, :, :0]]
    for (rows, seen, _), weight in weights(taps, v.shape[2], sequence):
        scores = q[:, :, rows] @ k[:, :, seen].mT * weight
        outputs.append(scores @ v[:, :, seen])
    return torch.cat(outputs, dim=2)


def products_gradients(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, taps: Tensor, sequence: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def forward(inputs: ConvolutionInputs) -> tuple[Tensor, Tensor]:
    q, k, v, taps, sequence = prepared(inputs)
    if q is not None and k is not None and q.shape[-1] > 1:
        o = by_products(q, k, v, taps, sequence)
        return tokens_first(o).to(inputs.v.dtype), v.new_empty(0)
    x = v if k is None else k * v
    y = heads_of(by_halves(rows_of(x), taps, sequence), x)
    o = tokens_first(y if q is None else q * y).to(inputs.v.dtype)
    return o, y.new_empty(0) if q is None else tokens_first(y)


def backward(given: Backward[ConvolutionInputs]) -> Gradients:
    (d_o,), (read,), inputs = given.gradients, given.saved, given.inputs
    assert d_o is not None
    q, k, v, taps, sequence = prepared(inputs)
    d_o = d_o.to(inputs.dtype).transpose(1, 2)
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    if q is not None and k is not None and q.shape[-1] > 1:
        d_q, d_k, d_v, d_taps = products_gradients(d_o, q, k, v, taps, sequence)
    else:
        d_y, x = (d_o, v) if q is None or k is None else (d_o * q, k * v)
        d_x, d_taps = halves_gradients(rows_of(d_y), rows_of(x), taps, sequence)
        d_v = heads_of(d_x, x)
        if q is not None and k is not None:
            d_q = (d_o * read.transpose(1, 2)).sum(-1, keepdim=True)
            d_v, d_k = d_v * k, (d_v * v).sum(-1, keepdim=True)
    dtype = inputs.v.dtype
    d_q, d_k = (None if d is None else tokens_first(d).to(dtype) for d in (d_q, d_k))
    return tokens_first(d_v).to(dtype), d_taps.to(inputs.taps.dtype), d_q, d_k


Prepared = tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]


def prepared(inputs: ConvolutionInputs) -> Prepared:
    """q, k and v with the heads first and the taps, all wide; and the sequence of each token."""
    wide = [None if x is None else x.to(inputs.dtype) for x in inputs[:4]]
    v, taps, q, k = (x if x is None or x is wide[1] else x.transpose(1, 2) for x in wide)
    assert v is not None
    assert taps is not None
    sequence = None
    if inputs.cu_seqlens is not None:
        sequence = sequence_of(inputs.cu_seqlens.to(v.device), v.shape[2])
    return q, k, v, taps, sequence


def rows_of(x: Tensor) -> Tensor:
    """[B, H, T, V] -> [H, B V, T]."""
    return x.permute(1, 0, 3, 2).flatten(1, 2).contiguous()


def heads_of(y: Tensor, x: Tensor) -> Tensor:
    """The inverse, for the rows of x."""
    return y.view(x.shape[1], x.shape[0], x.shape[3], x.shape[2]).permute(1, 0, 3, 2)


def tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def fake(inputs: ConvolutionInputs) -> tuple[Tensor, Tensor]:
    saves = inputs.q is not None and inputs.q.shape[-1] == 1
    shape = inputs.v.shape if saves else (0,)
    return inputs.v.new_empty(inputs.v.shape), inputs.v.new_empty(shape, dtype=inputs.dtype)


rules = Rules(1, (1,), ("v", "taps", "q", "k"), otherwise='use impl="reference"')
operator: Operator[ConvolutionInputs] = Operator(
    "long_convolution", ConvolutionInputs, forward, backward, fake, returned=2, rules=rules
)
