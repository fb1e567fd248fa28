"""Scores of the pairs of rows of a chunk, and what the rows read and write by them.

    scores_ij = sum_c x_ic y_jc between_ij(c)        j <= i, or j < i where strict

A decay for each head is a factor of x y^T; one for each channel is inside the product, and has its
scores in channel_scores.py.
"""

from typing import Any, NamedTuple

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


# exp of it is 0 in float32 and in float64; unlike -inf, it times 0 is 0.
LOWEST = -1e4


# The arguments of a call, cut into chunks: see passes.py.
Inputs = Any


class HeadPairs(NamedTuple):
    """One decay for all channels of a pair [.., C, C], of which j <= i mean something, or none.

    Its scores are those of x [M, H, G, C*m, K] and y [M, H, G, C*n, K], zeros elsewhere. Gradients
    are by x, y and the exponents; what is no pair counts for nothing, and d_scores may be
    overwritten.
    """

    matrix: Tensor | None

    @classmethod
    def of(cls, log_decay: Tensor, own_row: bool) -> "HeadPairs":
        return cls(pair_sums(log_decay, own_row).squeeze(-1).exp_())

    def scores(self, x: Tensor, y: Tensor, *, strict: bool) -> Tensor:
        product = mask(x @ y.mT, strict)
        return product if self.matrix is None else _times(product, self.matrix)

    def backward(
        self, d_scores: Tensor, scores: Tensor, x: Tensor, y: Tensor, *, strict: bool
    ) -> tuple[Tensor, Tensor | None, "HeadPairs"]:
        """Of x against itself: the gradient of both sides, which one product serves, and None."""
        d_product, d_pairs = d_scores, self
        if self.matrix is not None:
            pairs, size = d_scores * scores, self.matrix.shape[-1]
            if pairs.shape[-1] != size:
                pairs = pairs.unflatten(-1, (size, -1)).unflatten(-3, (size, -1)).sum((-3, -1))
            d_product, d_pairs = _times(d_scores, self.matrix), HeadPairs(pairs)
        shared = leading_axes(x, y)
        d_product = mask(d_product, strict).sum_to_size(*shared, *d_product.shape[-2:])
        if x is y:
            return (d_product + d_product.mT) @ x, None, d_pairs
        dx, dy = d_product @ y, d_product.mT @ x
        return dx.sum_to_size(x.shape), dy.sum_to_size(y.shape), d_pairs

    def log_gradient(self, own_row: bool) -> Tensor | None:
        return None if self.matrix is None else pair_sums_backward(self.matrix[..., None], own_row)


class Decay(NamedTuple):
    """All factors of one window, or the gradients by their exponents; None where not used."""

    start: Tensor | None = None  # [.., C, D]
    end: Tensor | None = None  # [.., C, D]
    whole: Tensor | None = None  # of the chunk [.., 1, D]
    between: Any = None  # HeadPairs or ChannelPairs
    start_before: Tensor | None = None  # `start` and `between` without the row itself
    between_before: Any = None


def decay_backward(d: Decay, size: int) -> Tensor | None:
    sums = (d.start, True, True), (d.end, False, False), (d.start_before, False, True)
    parts = [row_sums(x, own_row, back) for x, own_row, back in sums if x is not None]
    if d.whole is not None:
        parts.append(d.whole.expand(*d.whole.shape[:-2], size, -1))
    for between, own_row in ((d.between, True), (d.between_before, False)):
        if between is not None and (part := between.log_gradient(own_row)) is not None:
            parts.append(part)
    return sum(parts[1:], parts[0]) if parts else None


def scale(x: Tensor, factor: Tensor | None) -> Tensor:
    """Rows [.., C*n, K] times a factor [.., C, D] for each token."""
    if factor is None:
        return x
    if x.shape[-2] == factor.shape[-2]:
        return x * factor
    return (x.unflatten(-2, (factor.shape[-2], -1)) * factor.unsqueeze(-2)).flatten(-3, -2)


class Rows(NamedTuple):
    """Queries or keys under a decay, which meet a state and, on its other side, values.

    A factor for each head waits for the values, so that what the heads of a group share stays one
    tensor; it meets the states of all of them side by side, in one product.
    """

    rows: Tensor  # [M, H, 1 or G, C*n, K]; under the decay already where channels decay apart
    factor: Tensor | None  # [M, H, G, C, 1], or None

    @classmethod
    def of(cls, x: Tensor, factor: Tensor | None) -> "Rows":
        by_head = factor is None or factor.shape[-1] == 1
        return cls(x, factor) if by_head else cls(scale(x, factor), None)

    def part(self, chunks: slice) -> "Rows":
        return Rows(self.rows[chunks], None if self.factor is None else self.factor[chunks])

    def read(self, state: Tensor) -> Tensor:
        """[.., C*n, V] of a state [M, H, G, V, K]."""
        groups, values = self.rows.shape[2], state.shape[-2]
        if groups == state.shape[2]:
            return self.weigh(self.rows @ state.mT)
        product = self.rows @ state.unflatten(2, (groups, -1)).flatten(3, 4).mT
        return self.weigh(product.unflatten(-1, (-1, values)).transpose(3, 4).flatten(2, 3))

    def write(self, values: Tensor) -> Tensor:
        """[.., V, K] of values [.., C*n, V]."""
        groups, weighed = self.rows.shape[2], self.weigh(values)
        if groups == values.shape[2]:
            return weighed.mT @ self.rows
        beside = weighed.unflatten(2, (groups, -1)).transpose(3, 4).flatten(4)
        return (beside.mT @ self.rows).unflatten(3, (-1, values.shape[-1])).flatten(2, 3)

    def weigh(self, values: Tensor) -> Tensor:
        return scale(values, self.factor)

    def backward(
        self, values: Tensor, state: Tensor, x: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients by x and by the exponent of the factor, of the sum of values * read(state)."""
        d_rows = self.weigh(values) @ state
        if self.factor is None:
            return scale_backward(d_rows, self.rows, x, factor)
        return d_rows.sum_to_size(x.shape), exponent_gradient(d_rows, x, self.factor)


def scale_backward(
    d_scaled: Tensor, scaled: Tensor, x: Tensor, factor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    dx = scale(d_scaled, factor).sum_to_size(x.shape)
    return dx, None if factor is None else exponent_gradient(d_scaled, scaled, factor)


def exponent_gradient(d_scaled: Tensor, scaled: Tensor, factor: Tensor) -> Tensor:
    """The second of these, [.., C, D]."""
    d_exponent = d_scaled * scaled
    if factor.shape[-1] == 1:
        d_exponent = d_exponent.sum(-1, keepdim=True)
    if d_exponent.shape[-2] != factor.shape[-2]:
        d_exponent = d_exponent.unflatten(-2, (factor.shape[-2], -1)).sum(-2)
    return d_exponent


def add(x: Any, y: Any) -> Any:
    """The sum of two gradients, part by part; None is that of something that is not there."""
    if x is None or y is None:
        return y if x is None else x
    if isinstance(x, Tensor):
        return x + y
    parts = map(add, x, y)
    return type(x)(*parts) if isinstance(x, tuple) else [*parts]


def row_sums(x: Tensor, own_row: bool, back: bool = False) -> Tensor:
    """The sums of the rows up to each, or `back` from each on, with or without that row."""
    x = x.flip(-2) if back else x
    x = x.cumsum(-2) if own_row else F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))
    return x.flip(-2) if back else x


def pair_sums(log_decay: Tensor, own_row: bool) -> Tensor:
    """sum over j < s <= i, or j < s < i: [.., L, D] -> [.., L, L, D], zeros where i <= j."""
    sums = (log_decay.unsqueeze(-2) * _after(log_decay)).cumsum(-3)
    return sums if own_row else F.pad(sums[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


def pair_sums_backward(d_sums: Tensor, own_row: bool) -> Tensor:
    """Gradient by log_decay [.., L, D]; entries with i <= j count for nothing."""
    if not own_row:
        d_sums = F.pad(d_sums[..., 1:, :, :], (0, 0, 0, 0, 0, 1))
    later = d_sums.flip(-3).cumsum(-3).flip(-3)
    return (later * _after(later[..., 0, :])).sum(-2)


def _after(log_decay: Tensor) -> Tensor:
    """[L, L, 1]: 1 where row s comes after column j."""
    size = log_decay.shape[-2]
    return log_decay.new_ones(size, size).tril_(-1).unsqueeze(-1)


def _times(scores: Tensor, matrix: Tensor) -> Tensor:
    """Scores [.., C*m, C*n], overwritten if of that shape, times the decay between their tokens."""
    size = matrix.shape[-1]
    if scores.shape == matrix.shape:
        return scores.mul_(matrix)
    if scores.shape[-2:] == (size, size):
        return scores * matrix
    tokens = scores.unflatten(-1, (size, -1)).unflatten(-3, (size, -1))
    return (tokens * matrix[..., :, None, :, None]).flatten(-2).flatten(-3, -2)


def leading_axes(*given: Tensor) -> torch.Size:
    """What the axes before the last two broadcast to.

    PyTorch's own `broadcast_shapes` loads sympy for it, which takes half a second.
    """
    return torch.broadcast_tensors(*(x[..., :0, :0] for x in given))[0].shape[:-2]


def mask(scores: Tensor, strict: bool) -> Tensor:
    """Keep the pairs: columns before the row; without `strict`, its own token's columns too.

    The scores may be overwritten.
    """
    rows, columns = scores.shape[-2:]
    if strict or rows == columns:
        return scores.tril_(-1 if strict else 0)
    row = torch.arange(rows, device=scores.device)[:, None]
    column = torch.arange(columns, device=scores.device) // (columns // rows)
    return torch.where(column <= row, scores, 0)


# What each row writes once the rows before it have written: a unit lower triangular system.
#
#     X = (I - L)^-1 (F + E S^T) = x0 + from_state S^T
#
# With a tied erase  L_ij = -beta_i k_i.k_j,  F = beta v,            E = -beta k start.
# With a free erase  L_ij = a_i.b_j,          F = (a_i.k_j) v,       E = a start_before.
# The inverse is by substitution: exact to rounding for any keys, where a power series is not.


class Corrected(NamedTuple):
    """X = x0 + from_state S^T for the chunks of a window, and what the backward needs of them."""

    x0: Tensor  # [M, H, G, R, V]
    from_state: Tensor  # [M, H, G, R, K]
    inverse: Tensor  # (I - L)^-1 [M, H, G, R, R]
    scores: Tensor  # k against k where tied, a against b where free
    values: Tensor  # the same where tied, a against k where free
    scaled: Tensor  # k or a under the decay from the chunk's start


def tied(chunks: Inputs, decay: Decay) -> Corrected:
    """Of k [M, H, 1, R, K], v [M, H, G, R, V] and beta [M, H, G, R, 1]."""
    k, v, beta = chunks.k, chunks.v, chunks.beta
    scores = decay.between.scores(k, k, strict=True)
    inverse = _inverse(beta * scores)
    scaled = scale(k, decay.start)
    weighted = inverse * beta.mT
    from_state = (weighted @ scaled).neg_()
    return Corrected(weighted @ v, from_state, inverse, scores, scores, scaled)


def tied_backward(
    dx: Tensor, x: Tensor, state: Tensor, chunk: Corrected, chunks: Inputs, decay: Decay
) -> tuple[Tensor, Tensor, Tensor, Decay]:
    """Gradients by k, v, beta and the decay's exponents, given dx by the corrected values x.

    With dF = (I - L)^-T dX: dv = beta dF, and dbeta_i = dF_i . (v - S k start - sum_j L'_ij x_j)_i
    for the scores L' of k against k, so that beta = 0 needs no division.
    """
    k, v, beta = chunks.k, chunks.v, chunks.beta
    d_values = chunk.inverse.mT @ dx
    by_state, by_scores = d_values @ state, d_values @ x.mT
    d_beta = (d_values * v).sum(-1, keepdim=True)
    d_beta -= (by_state * chunk.scaled).sum(-1, keepdim=True)
    d_beta -= (by_scores * chunk.scores).sum(-1, keepdim=True)
    *dk_scores, d_between = decay.between.backward(
        by_scores.mul_(-beta), chunk.scores, k, k, strict=True
    )
    dk, d_start = scale_backward(by_state.mul_(-beta), chunk.scaled, k, decay.start)
    d_decay = Decay(start=d_start, between=d_between)
    return dk.add_(add(*dk_scores)), beta * d_values, d_beta, d_decay


def free(chunks: Inputs, decay: Decay) -> Corrected:
    """Of a and b [M, H, G, R, K], k [M, H, 1, R, K] and v [M, H, G, R, V]."""
    a, b, k, v = chunks.a, chunks.b, chunks.k, chunks.v
    scores = decay.between_before.scores(a, b, strict=True)
    values = decay.between_before.scores(a, k, strict=True)
    inverse = _inverse(-scores)
    scaled = scale(a, decay.start_before)
    return Corrected(inverse @ (values @ v), inverse @ scaled, inverse, scores, values, scaled)


def free_backward(
    dx: Tensor, x: Tensor, state: Tensor, chunk: Corrected, chunks: Inputs, decay: Decay
) -> tuple[Tensor, Tensor, Tensor, Tensor, Decay]:
    """Gradients by a, b, k, v and the decay's exponents, given dx by the corrected values x."""
    a, b, k, v = chunks.a, chunks.b, chunks.k, chunks.v
    d_values = chunk.inverse.mT @ dx
    between = decay.between_before
    da, db, d_between = between.backward(d_values @ x.mT, chunk.scores, a, b, strict=True)
    da_values, dk, d_values_between = between.backward(
        d_values @ v.mT, chunk.values, a, k, strict=True
    )
    da_start, d_start = scale_backward(d_values @ state, chunk.scaled, a, decay.start_before)
    d_decay = Decay(start_before=d_start, between_before=add(d_between, d_values_between))
    return da.add_(da_values).add_(da_start), db, dk, chunk.values.mT @ d_values, d_decay


def _inverse(lower: Tensor) -> Tensor:
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    # From the other side MKL's error is four to five times as large on some CPUs.
    return torch.linalg.solve_triangular(
        lower, identity.expand_as(lower), upper=False, unitriangular=True, left=False
    )
