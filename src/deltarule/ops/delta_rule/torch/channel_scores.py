"""Scores of the rows of a chunk whose channels decay apart.

Below the diagonal, block by block, a decay is shared out among the factors of a product,

    scores = (x late) (y early)^T

and in the blocks on the diagonal (a leaf) it is summed pair by pair. A block below the diagonal
splits at the first row m of its later half, where both factors are at most 1:

    between_ij = exp(sum over m <= s <= i) * exp(sum over j < s < m) = late_i * early_j
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.torch.scores import (
    exponent_gradient,
    leading_axes,
    mask,
    pair_sums,
    pair_sums_backward,
    row_sums,
    scale,
)

# Tokens in a leaf.
LEAF = 4


class ChannelPairs(NamedTuple):
    """Decays of all pairs by blocks, or the gradients by their exponents."""

    leaf: Tensor  # [.., C / L, L, L, K]
    late: list[Tensor]  # [.., blocks, half, K] for half = L, 2 L, .., C / 2
    early: list[Tensor]  # the same

    @classmethod
    def of(cls, log_decay: Tensor, own_row: bool) -> "ChannelPairs":
        size = log_decay.shape[-2]
        leaf = min(size, LEAF)
        late, early = [], []
        for half in halves(size, leaf):
            before, after = split(log_decay, size, half)
            late.append(row_sums(after, own_row).exp_())
            early.append(row_sums(before, False, back=True).exp_())
        return cls(pair_sums(blocks(log_decay, size, leaf), own_row).exp_(), late, early)

    @property
    def sizes(self) -> tuple[int, int]:
        leaf = self.leaf.shape[-2]
        return leaf, leaf * self.leaf.shape[-4]

    def scores(self, x: Tensor, y: Tensor, *, strict: bool) -> Tensor:
        leaf, size = self.sizes
        lead = leading_axes(x, y, self.leaf[..., 0, 0])
        scores = x.new_zeros(*lead, x.shape[-2], y.shape[-2])
        # Pair by pair in one leaf: x [.., L*m, K], y [.., L*n, K], decays [.., L, L, K].
        x_rows = blocks(x, size, leaf).unflatten(-2, (leaf, -1))
        pairs = (x_rows @ _decayed(blocks(y, size, leaf), self.leaf).mT).flatten(-3, -2)
        diagonal(scores, size, leaf).copy_(mask(pairs, strict))
        for half, late, early in zip(halves(size, leaf), self.late, self.early, strict=True):
            x_late, y_early = split(x, size, half)[1], split(y, size, half)[0]
            below(scores, size, half).copy_(scale(x_late, late) @ scale(y_early, early).mT)
        return scores

    def backward(
        self, d_scores: Tensor, scores: Tensor, x: Tensor, y: Tensor, *, strict: bool
    ) -> tuple[Tensor, Tensor, "ChannelPairs"]:
        leaf, size = self.sizes
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        x_leaf, y_leaf = blocks(x, size, leaf), blocks(y, size, leaf)
        y_decayed, each_row = _decayed(y_leaf, self.leaf), (leaf, -1)
        d_rows = mask(diagonal(d_scores, size, leaf), strict).unflatten(-2, each_row)
        d_decayed = d_rows.mT @ x_leaf.unflatten(-2, each_row)
        d_steps = d_decayed.unflatten(-2, each_row) * self.leaf.unsqueeze(-2)
        dx_leaf = (d_rows @ y_decayed).flatten(-3, -2)
        blocks(dx, size, leaf).add_(dx_leaf.sum_to_size(x_leaf.shape))
        dy_leaf = d_steps.sum(-4).flatten(-3, -2)
        blocks(dy, size, leaf).add_(dy_leaf.sum_to_size(y_leaf.shape))
        d_leaf = (d_decayed * y_decayed).unflatten(-2, each_row).sum(-2)
        d_between = ChannelPairs(d_leaf, [], [])
        for half, late, early in zip(halves(size, leaf), self.late, self.early, strict=True):
            x_late, y_early = split(x, size, half)[1], split(y, size, half)[0]
            x_scaled, y_scaled = scale(x_late, late), scale(y_early, early)
            d_block = below(d_scores, size, half)
            d_late, d_early = d_block @ y_scaled, d_block.mT @ x_scaled
            split(dx, size, half)[1].add_(scale(d_late, late).sum_to_size(x_late.shape))
            split(dy, size, half)[0].add_(scale(d_early, early).sum_to_size(y_early.shape))
            d_between.late.append(exponent_gradient(d_late, x_scaled, late))
            d_between.early.append(exponent_gradient(d_early, y_scaled, early))
        return dx, dy, d_between

    def log_gradient(self, own_row: bool) -> Tensor:
        leaf, size = self.sizes
        d_log = pair_sums_backward(self.leaf, own_row).flatten(-3, -2)
        for half, d_late, d_early in zip(halves(size, leaf), self.late, self.early, strict=True):
            early, late = split(d_log, size, half)
            late += row_sums(d_late, own_row, back=True)
            early += row_sums(d_early, False)
        return d_log


def halves(size: int, leaf: int) -> Iterator[int]:
    """Half-block sizes from a leaf up: leaf, 2 leaf, .., size / 2."""
    while leaf < size:
        yield leaf
        leaf *= 2


def blocks(x: Tensor, size: int, block: int) -> Tensor:
    """[.., C*n, K] -> [.., C / block, block*n, K]."""
    return x.unflatten(-2, (size // block, -1))


def split(x: Tensor, size: int, half: int) -> tuple[Tensor, Tensor]:
    """Earlier and later half of each block of 2 half tokens: [.., blocks, half*n, K]."""
    early, late = x.unflatten(-2, (size // (2 * half), 2, -1)).unbind(-3)
    return early, late


def diagonal(scores: Tensor, size: int, block: int) -> Tensor:
    """The blocks on the diagonal, as a view: [.., C / block, block*m, block*n]."""
    count = size // block
    grid = scores.unflatten(-1, (count, -1)).unflatten(-3, (count, -1))
    return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def below(scores: Tensor, size: int, half: int) -> Tensor:
    """A view of each diagonal block of 2 half tokens: its later rows, its earlier columns."""
    block = diagonal(scores, size, 2 * half)
    return block[..., block.shape[-2] // 2 :, : block.shape[-1] // 2]


def _decayed(y: Tensor, between: Tensor) -> Tensor:
    """y_j as row i sees it: [.., L*n, K], [.., L, L, K] -> [.., L, L*n, K]."""
    steps = y.unflatten(-2, (between.shape[-2], -1)).unsqueeze(-4)
    return (between.unsqueeze(-2) * steps).flatten(-3, -2)
