"""One causal convolution a channel: halves of halves, the long ones by FFT.

y_t = sum_{j=0..L-1} taps_j x_{t-j}

A token of the right half of a block of 2 s sees the left half, and never the reverse: what a token
is changes no bit of an earlier output, as it would in one FFT over all of them. Blocks of 2, 4, ..
tokens cover all pairs. Exactly one packed sequence crosses the middle of a block: the others are
masked there, and packing costs nothing else.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this many tokens of a half, a product with the matrix of the taps is less than an FFT.
PRODUCT = 32
LEFT, RIGHT = 0, 1


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
        yield Halves(s, m, blocks, None if sequence is None else crossing(sequence, s, m, blocks))
        s *= 2


def crossing(sequence: Tensor, s: int, m: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Which tokens next to each middle belong to the sequence of the token behind it."""
    padded = F.pad(sequence, (0, blocks * 2 * s - len(sequence)), value=-1).view(blocks, 2 * s)
    middle = padded[:, s : s + 1]
    return padded[:, s - m : s] == middle, padded[:, s : s + m] == middle


def convolve(x: Tensor, taps: Tensor, sequence: Tensor | None) -> Tensor:
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


def gradients(
    d_y: Tensor, x: Tensor, taps: Tensor, sequence: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients by x and by the taps, of what `convolve` returned."""
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
