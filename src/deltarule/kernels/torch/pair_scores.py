"""Scores of every pair of rows in a chunk, each under the decay between them.

    scores_ij = sum_c x_ic y_jc between_ij(c)        j <= i, or j < i where strict

A decay for each head is a factor of x y^T. A decay for each channel is inside the product: below
the diagonal, block by block, it is shared out among the factors,

    scores = (x late) (y early)^T

and in the leaves on the diagonal it is summed pair by pair.
"""

import torch
from torch import Tensor

from deltarule.kernels.torch.decay import (
    Between,
    below,
    blocks,
    diagonal,
    halves,
    scale,
    scale_backward,
    split,
)


def pair_scores(x: Tensor, y: Tensor, between: Between | None, *, strict: bool) -> Tensor:
    """x [M, H, G, C*m, K], y [M, H, G, C*n, K] -> scores [M, H, G, C*m, C*n], zeros elsewhere."""
    if between is None:
        return _mask(x @ y.mT, strict)
    if between.matrix is not None:
        return _mask(_times(x @ y.mT, between.matrix), strict)
    leaf, size = _sizes(between)
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], between.leaf.shape[:-4])
    scores = x.new_zeros(*lead, x.shape[-2], y.shape[-2])
    pairs = _leaf_scores(blocks(x, size, leaf), blocks(y, size, leaf), between.leaf)
    diagonal(scores, size, leaf).copy_(_mask(pairs, strict))
    for half, late, early in zip(halves(size, leaf), between.late, between.early, strict=True):
        x_late, y_early = split(x, size, half)[1], split(y, size, half)[0]
        below(scores, size, half).copy_(scale(x_late, late) @ scale(y_early, early).mT)
    return scores


def pair_scores_backward(
    d_scores: Tensor,
    scores: Tensor,
    x: Tensor,
    y: Tensor,
    between: Between | None,
    *,
    strict: bool,
) -> tuple[Tensor, Tensor, Between | None]:
    """Gradients by x, y and the exponents of `between`; what is no pair counts for nothing.

    d_scores may be overwritten.
    """
    if between is None or between.matrix is not None:
        return _backward_by_head(d_scores, scores, x, y, between, strict)
    leaf, size = _sizes(between)
    dx, dy = torch.zeros_like(x), torch.zeros_like(y)
    d_pairs = _mask(diagonal(d_scores, size, leaf), strict)
    dx_leaf, dy_leaf, d_leaf = _leaf_backward(
        d_pairs, blocks(x, size, leaf), blocks(y, size, leaf), between.leaf
    )
    blocks(dx, size, leaf).add_(dx_leaf.sum_to_size(blocks(x, size, leaf).shape))
    blocks(dy, size, leaf).add_(dy_leaf.sum_to_size(blocks(y, size, leaf).shape))
    d_between = Between(d_leaf, [], [])
    for half, late, early in zip(halves(size, leaf), between.late, between.early, strict=True):
        x_late, y_early = split(x, size, half)[1], split(y, size, half)[0]
        x_scaled, y_scaled = scale(x_late, late), scale(y_early, early)
        d_block = below(d_scores, size, half)
        d_late, d_late_sum = scale_backward(d_block @ y_scaled, x_scaled, x_late, late)
        d_early, d_early_sum = scale_backward(d_block.mT @ x_scaled, y_scaled, y_early, early)
        split(dx, size, half)[1].add_(d_late)
        split(dy, size, half)[0].add_(d_early)
        d_between.late.append(d_late_sum)
        d_between.early.append(d_early_sum)
    return dx, dy, d_between


def own_scores_backward(
    d_scores: Tensor, scores: Tensor, x: Tensor, between: Between | None
) -> tuple[Tensor, Between | None]:
    """The same for the strict scores of x against itself: one product serves both sides."""
    if between is not None and between.matrix is None:
        dx, dy, d_between = pair_scores_backward(d_scores, scores, x, x, between, strict=True)
        return dx + dy, d_between
    d_product, d_between = _product_backward(d_scores, scores, between, strict=True)
    d_product = d_product.sum_to_size(*x.shape[:-2], *d_product.shape[-2:])
    return (d_product + d_product.mT) @ x, d_between


def _backward_by_head(
    d_scores: Tensor, scores: Tensor, x: Tensor, y: Tensor, between: Between | None, strict: bool
) -> tuple[Tensor, Tensor, Between | None]:
    d_product, d_between = _product_backward(d_scores, scores, between, strict)
    shared = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    d_product = d_product.sum_to_size(*shared, *d_product.shape[-2:])
    dx, dy = d_product @ y, d_product.mT @ x
    return dx.sum_to_size(x.shape), dy.sum_to_size(y.shape), d_between


def _product_backward(
    d_scores: Tensor, scores: Tensor, between: Between | None, strict: bool
) -> tuple[Tensor, Between | None]:
    """Gradients by x y^T and by the exponents of a decay for each head."""
    if between is None or between.matrix is None:
        return _mask(d_scores, strict), None
    pairs = d_scores * scores
    size = between.matrix.shape[-1]
    if pairs.shape[-1] != size:
        pairs = pairs.unflatten(-1, (size, -1)).unflatten(-3, (size, -1)).sum((-3, -1))
    d_between = Between(pairs[..., None, :, :, None], [], [])
    return _mask(_times(d_scores, between.matrix), strict), d_between


def _leaf_scores(x: Tensor, y: Tensor, between: Tensor) -> Tensor:
    """Pair by pair in one leaf: x [.., L*m, K], y [.., L*n, K], between [.., L, L, K]."""
    return (x.unflatten(-2, (between.shape[-2], -1)) @ _decayed(y, between).mT).flatten(-3, -2)


def _leaf_backward(
    d_pairs: Tensor, x: Tensor, y: Tensor, between: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, y and the exponents of `between`."""
    leaf = between.shape[-2]
    d_rows = d_pairs.unflatten(-2, (leaf, -1))
    y_decayed = _decayed(y, between)
    dx = (d_rows @ y_decayed).flatten(-3, -2)
    d_decayed = d_rows.mT @ x.unflatten(-2, (leaf, -1))
    steps = d_decayed.unflatten(-2, (leaf, -1))
    dy = (steps * between.unsqueeze(-2)).sum(-4).flatten(-3, -2)
    d_sums = (d_decayed * y_decayed).unflatten(-2, (leaf, -1)).sum(-2)
    return dx, dy, d_sums


def _decayed(y: Tensor, between: Tensor) -> Tensor:
    """y_j as row i sees it: [.., L*n, K], [.., L, L, K] -> [.., L, L*n, K]."""
    steps = y.unflatten(-2, (between.shape[-2], -1)).unsqueeze(-4)
    return (between.unsqueeze(-2) * steps).flatten(-3, -2)


def _times(scores: Tensor, matrix: Tensor) -> Tensor:
    """Scores [.., C*m, C*n], overwritten if of that shape, times the decay between their tokens."""
    size = matrix.shape[-1]
    if scores.shape == matrix.shape:
        return scores.mul_(matrix)
    if scores.shape[-2:] == (size, size):
        return scores * matrix
    tokens = scores.unflatten(-1, (size, -1)).unflatten(-3, (size, -1))
    return (tokens * matrix[..., :, None, :, None]).flatten(-2).flatten(-3, -2)


def _mask(scores: Tensor, strict: bool) -> Tensor:
    """Keep the pairs: columns before the row; without `strict`, its own token's columns too.

    The scores may be overwritten.
    """
    rows, columns = scores.shape[-2:]
    if strict or rows == columns:
        return scores.tril_(-1 if strict else 0)
    row = torch.arange(rows, device=scores.device)[:, None]
    column = torch.arange(columns, device=scores.device) // (columns // rows)
    return torch.where(column <= row, scores, 0)


def _sizes(between: Between) -> tuple[int, int]:
    """Tokens in a leaf and in a chunk."""
    leaf = between.leaf.shape[-2]
    return leaf, leaf * between.leaf.shape[-4]
