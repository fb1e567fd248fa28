"""Chunks that erase nothing, under a decay for each head or none.

    O = (q start) S^T + P V        P_ij = q_i.k_j between_ij, j <= i
    S <- S whole + sum over writes of (v end)^T k

Values are written as they are, so that no chunk needs another's: what is small is computed for a
whole window, and what each head has for itself by bunches of ranks, while a cache holds it.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.torch.scores import (
    Decay,
    HeadPairs,
    Rows,
    decay_backward,
    end_decay,
    mask,
    start_decay,
)


class Shared(NamedTuple):
    """What forward and backward know of a window before they look at its values."""

    q: Rows
    k: Rows
    scores: Tensor  # q_i.k_j, j <= i [M, H, 1, C, C]
    whole: Tensor | None  # [M, H, G, 1, 1]
    log_decay: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, log_decay: Tensor | None) -> "Shared":
        scores = mask(q @ k.mT, strict=False)
        if log_decay is None:
            return cls(Rows(q, None), Rows(k, None), scores, None, None)
        whole = log_decay.sum(-2, keepdim=True).exp_()
        start, end = start_decay(log_decay, own_row=True), end_decay(log_decay)
        return cls(Rows(q, start), Rows(k, end), scores, whole, log_decay)

    def pairs(self, here: slice) -> tuple[Tensor, Tensor | None]:
        """P [M, H, G, C, C] of a bunch, and between."""
        if self.log_decay is None:
            return self.scores[here], None
        between = HeadPairs.of(self.log_decay[here], own_row=True).matrix
        assert between is not None
        return self.scores[here] * between, between


def forward(
    window: Shared, v: Tensor, state: Tensor, states: Tensor, bunches: list[list[int]]
) -> Tensor:
    """o [M, H, G, C, V]; carries the state in place, and leaves it as each chunk found it."""
    o = torch.empty_like(v)
    for bounds in bunches:
        here = slice(bounds[0], bounds[-1])
        written = window.k.part(here).side_by_side(v[here])
        for first, last in pairwise(bounds):
            running = state[: last - first]
            states[first:last] = running
            if window.whole is not None:
                running *= window.whole[first:last]
            window.k.add(written[first - here.start : last - here.start], running, first)
        read = window.q.part(here).read(states[here])
        torch.add(read, window.pairs(here)[0] @ v[here], out=o[here])
    return o


def backward(
    window: Shared,
    v: Tensor,
    states: Tensor,
    d_o: Tensor,
    d_state: Tensor,
    bunches: list[list[int]],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients by q, k, v and log_decay; that of the state is carried back in place."""
    q, k = window.q.rows, window.k.rows
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_scores = torch.empty_like(window.scores)
    d_log_decay = None if window.log_decay is None else torch.empty_like(window.log_decay)
    for bounds in reversed(bunches):
        here = slice(bounds[0], bounds[-1])
        reads, writes = window.q.part(here), window.k.part(here)
        read, d_ends = reads.side_by_side(d_o[here]), torch.empty_like(states[here])
        for first, last in reversed(list(pairwise(bounds))):
            running, own = d_state[: last - first], slice(first - here.start, last - here.start)
            d_ends[own] = running
            if window.whole is not None:
                running *= window.whole[first:last]
            window.q.add(read[own], running, first)
        pairs, between = window.pairs(here)
        torch.add(writes.read(d_ends), pairs.mT @ d_o[here], out=dv[here])
        dq[here], d_start = reads.backward(d_o[here], states[here], q[here], reads.factor)
        dk[here], d_end = writes.backward(v[here], d_ends, k[here], writes.factor)
        d_pairs = d_o[here] @ v[here].mT
        if d_log_decay is not None and window.whole is not None and between is not None:
            d_whole = (states[here] * d_ends).sum((-2, -1), keepdim=True) * window.whole[here]
            d_decay = Decay(d_start, d_end, d_whole, HeadPairs(d_pairs * pairs))
            by_log = decay_backward(d_decay, q.shape[-2])
            assert by_log is not None
            d_log_decay[here] = by_log
            d_pairs *= between
        torch.sum(d_pairs, 2, keepdim=True, out=d_scores[here])
    mask(d_scores, strict=False)
    dq += d_scores @ k
    dk += d_scores.mT @ q
    return dq, dk, dv, d_log_decay
