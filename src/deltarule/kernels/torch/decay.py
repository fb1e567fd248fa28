"""Products of decays inside a chunk, each from its own sum of logs, and their gradients.

    start_i = exp(sum of log_decay up to i)          end_j = exp(sum of log_decay after j)
    between_ij = exp(sum of log_decay over j < s <= i)

No exponent is a difference of two sums: none overflows, a strong decay costs its neighbours no
digits, and a reset (-inf) is exact. log_decay is [M, H, G, C, D], with D = 1 for a decay of the
whole head and D = K for one of each channel. `own_row=False` leaves row i out of the sums.

`between` is stored by blocks. Blocks on the diagonal (a leaf) hold every pair. A block below the
diagonal splits at the first row m of its later half, where both factors are at most 1:

    between_ij = exp(sum over m <= s <= i) * exp(sum over j < s < m) = late_i * early_j
"""

from collections.abc import Iterator
from typing import NamedTuple, overload

import torch.nn.functional as F
from torch import Tensor

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
        """Of a head, all pairs [.., C, C], of which j <= i mean something; None of channels."""
        return self.leaf[..., 0, :, :, 0] if self.leaf.shape[-1] == 1 else None


class Decay(NamedTuple):
    """All factors of one slab, or the gradients by their exponents; None where not used."""

    start: Tensor | None = None  # [.., C, D]
    end: Tensor | None = None  # [.., C, D]
    whole: Tensor | None = None  # of the chunk [.., 1, D]
    between: Between | None = None
    start_before: Tensor | None = None  # `start` and `between` without the row itself
    between_before: Between | None = None


def make_decay(log_decay: Tensor | None, free_erase: bool) -> Decay:
    """The factors that a slab needs; the last two only with a free erase."""
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
    """Of each diagonal block of 2 half tokens: later rows against earlier columns, as a view."""
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
