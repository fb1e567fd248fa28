"""Scores of every pair of rows in a chunk, each under the decay between them.

    scores_ij = sum_c x_ic y_jc between_ij(c)        j <= i, or j < i where strict

A decay for each head is a factor of x y^T. A decay for each channel is inside the product: below
the diagonal, block by block, it is shared out among the factors,

    scores = (x late) (y early)^T

and in the leaves on the diagonal it is summed pair by pair.
"""

from collections.abc import Iterator
from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

# Products of decays inside a chunk, each from its own sum of logs, and their gradients.
#
#     start_i = exp(sum of log_decay up to i)          end_j = exp(sum of log_decay after j)
#     between_ij = exp(sum of log_decay over j < s <= i)
#
# No exponent is a difference of two sums: none overflows, a strong decay costs its neighbours no
# digits, and a reset (-inf) is exact. log_decay is [M, H, G, C, D], with D = 1 for a decay of the
# whole head and D = K for one of each channel. `own_row=False` leaves row i out of the sums.
#
# `between` is stored by blocks. Blocks on the diagonal (a leaf) hold every pair. A block below the
# diagonal splits at the first row m of its later half, where both factors are at most 1:
#
#     between_ij = exp(sum over m <= s <= i) * exp(sum over j < s < m) = late_i * early_j


# exp of it is 0 in float32 and in float64; unlike -inf, it times 0 is 0.
LOWEST = -1e4
# Tokens in a leaf, where each channel has its own decay; for a head, one leaf is the whole chunk.
LEAF = 4


class Between(NamedTuple):
    """Decays of all pairs by blocks, or the gradients by their exponents."""

    leaf: Tensor  # [.., C / L, L, L, D]
    late: list[Tensor]  # [.., blocks, half, D] for half = L, 2 L, .., C / 2
    early: list[Tensor]  # the same

    @property
    def matrix(self) -> Tensor | None:
        """Per head: all pairs [.., C, C], of which j <= i mean something. Per channel: None."""
        return self.leaf[..., 0, :, :, 0] if self.leaf.shape[-1] == 1 else None


class Decay(NamedTuple):
    """All factors of one window, or the gradients by their exponents; None where not used."""

    start: Tensor | None = None  # [.., C, D]
    end: Tensor | None = None  # [.., C, D]
    whole: Tensor | None = None  # of the chunk [.., 1, D]
    between: Between | None = None
    start_before: Tensor | None = None  # `start` and `between` without the row itself
    between_before: Between | None = None


def make_decay(log_decay: Tensor | None, free_erase: bool) -> Decay:
    """The factors that a window needs; the last two only with a free erase."""
    if log_decay is None:
        return Decay()
    before = (_start(log_decay, False), _between(log_decay, False)) if free_erase else (None, None)
    return Decay(
        _start(log_decay, True), _end(log_decay), log_decay.sum(-2, keepdim=True).exp_(),
        _between(log_decay, True), *before,
    )  # fmt: skip


def decay_backward(d: Decay, size: int) -> Tensor | None:
    """Gradient by log_decay [.., C, D] of gradients by all exponents."""
    parts = []
    if d.start is not None:
        parts.append(_reverse_cumsum(d.start))
    if d.end is not None:
        parts.append(_exclusive_cumsum(d.end))
    if d.whole is not None:
        parts.append(d.whole.expand(*d.whole.shape[:-2], size, -1))
    if d.start_before is not None:
        parts.append(_reverse_exclusive_cumsum(d.start_before))
    for between, own_row in ((d.between, True), (d.between_before, False)):
        if between is not None:
            parts.append(_between_backward(between, size, own_row))
    return sum(parts[1:], parts[0]) if parts else None


def scale(x: Tensor, factor: Tensor | None) -> Tensor:
    """Rows [.., C*n, K] times a factor [.., C, D] for each token."""
    if factor is None:
        return x
    if x.shape[-2] == factor.shape[-2]:
        return x * factor
    return (x.unflatten(-2, (factor.shape[-2], -1)) * factor.unsqueeze(-2)).flatten(-3, -2)


@overload
def scale_backward(
    d_scaled: Tensor, scaled: Tensor, x: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]: ...


@overload
def scale_backward(
    d_scaled: Tensor, scaled: Tensor, x: Tensor, factor: Tensor | None
) -> tuple[Tensor, Tensor | None]: ...


def scale_backward(
    d_scaled: Tensor, scaled: Tensor, x: Tensor, factor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients by x and by the exponent of the factor."""
    dx = scale(d_scaled, factor).sum_to_size(x.shape)
    if factor is None:
        return dx, None
    d_exponent = d_scaled * scaled
    if factor.shape[-1] == 1:
        d_exponent = d_exponent.sum(-1, keepdim=True)
    if d_exponent.shape[-2] != factor.shape[-2]:
        d_exponent = d_exponent.unflatten(-2, (factor.shape[-2], -1)).sum(-2)
    return dx, d_exponent


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


def add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y, where None is the gradient of something that is not there."""
    return y if x is None else x if y is None else x + y


def add_between(x: Between | None, y: Between | None) -> Between | None:
    """The same for gradients by blocks."""
    if x is None or y is None:
        return y if x is None else x
    late = [a + b for a, b in zip(x.late, y.late, strict=True)]
    early = [a + b for a, b in zip(x.early, y.early, strict=True)]
    return Between(x.leaf + y.leaf, late, early)


def _start(log_decay: Tensor, own_row: bool) -> Tensor:
    return (log_decay.cumsum(-2) if own_row else _exclusive_cumsum(log_decay)).exp_()


def _end(log_decay: Tensor) -> Tensor:
    return _reverse_exclusive_cumsum(log_decay).exp_()


def _exclusive_cumsum(x: Tensor) -> Tensor:
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def _reverse_cumsum(x: Tensor) -> Tensor:
    return x.flip(-2).cumsum(-2).flip(-2)


def _reverse_exclusive_cumsum(x: Tensor) -> Tensor:
    return F.pad(_reverse_cumsum(x[..., 1:, :]), (0, 0, 0, 1))


def _between(log_decay: Tensor, own_row: bool) -> Between:
    size = log_decay.shape[-2]
    leaf = size if log_decay.shape[-1] == 1 else min(size, LEAF)
    late, early = [], []
    for half in halves(size, leaf):
        before, after = split(log_decay, size, half)
        late.append(_start(after, own_row))
        early.append(_end(before))
    return Between(_pair_sums(blocks(log_decay, size, leaf), own_row).exp_(), late, early)


def _between_backward(d: Between, size: int, own_row: bool) -> Tensor:
    leaf = d.leaf.shape[-2]
    d_log = _pair_sums_backward(d.leaf, own_row).flatten(-3, -2)
    for half, d_late, d_early in zip(halves(size, leaf), d.late, d.early, strict=True):
        early, late = split(d_log, size, half)
        late += _reverse_cumsum(d_late) if own_row else _reverse_exclusive_cumsum(d_late)
        early += _exclusive_cumsum(d_early)
    return d_log


def _pair_sums(log_decay: Tensor, own_row: bool) -> Tensor:
    """sum over j < s <= i, or j < s < i: [.., L, D] -> [.., L, L, D], zeros where i <= j."""
    sums = (log_decay.unsqueeze(-2) * _after(log_decay)).cumsum(-3)
    return sums if own_row else F.pad(sums[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


def _pair_sums_backward(d_sums: Tensor, own_row: bool) -> Tensor:
    """Gradient by log_decay [.., L, D]; entries with i <= j count for nothing."""
    if not own_row:
        d_sums = F.pad(d_sums[..., 1:, :, :], (0, 0, 0, 0, 0, 1))
    later = d_sums.flip(-3).cumsum(-3).flip(-3)
    return (later * _after(later[..., 0, :])).sum(-2)


def _after(log_decay: Tensor) -> Tensor:
    """[L, L, 1]: 1 where row s comes after column j."""
    size = log_decay.shape[-2]
    return log_decay.new_ones(size, size).tril_(-1).unsqueeze(-1)


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


# What the queries of a chunk read: from the state at its start, and from the writes inside it.
#
# O = (q start) S^T + sum over writes of P X        P_ij = q_i.y_j between_ij, j <= i


class Queries(NamedTuple):
    """Queries decayed from the chunk's start, and their scores against the keys of each write."""

    scaled: Tensor
    scores: list[Tensor]


def queries(q: Tensor, keys: list[Tensor], decay: Decay) -> Queries:
    """q [M, H, 1, C, K], keys [M, H, 1 or G, C*n, K]."""
    scores = [pair_scores(q, y, decay.between, strict=False) for y in keys]
    return Queries(scale(q, decay.start), scores)


def chunk_output(chunk: Queries, states: Tensor, values: list[Tensor]) -> Tensor:
    """States [M, H, G, V, K], values X [M, H, G, C*n, V] -> o [M, H, G, C, V]."""
    o = chunk.scaled @ states.mT
    for scores, x in zip(chunk.scores, values, strict=True):
        o += scores @ x
    return o


def chunk_output_backward(chunk: Queries, d_o: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients by the values X of each write, and by the states."""
    return [scores.mT @ d_o for scores in chunk.scores], d_o.mT @ chunk.scaled


def queries_backward(
    d_o: Tensor,
    states: Tensor,
    values: list[Tensor],
    chunk: Queries,
    q: Tensor,
    keys: list[Tensor],
    decay: Decay,
) -> tuple[Tensor, list[Tensor], Decay]:
    """Gradients by q, the keys of each write, and the decay's exponents."""
    dq, d_start = scale_backward(d_o @ states, chunk.scaled, q, decay.start)
    d_keys: list[Tensor] = []
    d_between: Between | None = None
    for x, y, scores in zip(values, keys, chunk.scores, strict=True):
        dq_pairs, dy, d_pairs = pair_scores_backward(
            d_o @ x.mT, scores, q, y, decay.between, strict=False
        )
        dq = dq + dq_pairs
        d_keys.append(dy)
        d_between = add_between(d_between, d_pairs)
    return dq, d_keys, Decay(start=d_start, between=d_between)
