"""Where the tokens of a call lie in mini-batches that are counted from each sequence's start.

A mini-batch has C slots. Sequence n, which had position[n] tokens in an open mini-batch, puts its
token t into slot position[n] + t; slots without a token are empty. Sequences of a batch lie side by
side; packed ones are dealt out to lanes, one after another in each.
"""

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.checks import readable
from deltarule.ops.history import sequence_of


class Lanes(NamedTuple):
    """Where each of N sequences has its mini-batches, on the device of the tokens."""

    owner: Tensor  # [M, R] the sequence of each mini-batch; N where the lane is idle
    lane: Tensor  # [N] the lane of each sequence
    start: Tensor  # [N] its first step there


def make_lanes(
    cu_seqlens: Tensor, position: Tensor | None, tokens: int, size: int, device: torch.device
) -> Lanes:
    """Schedule sequences that have `position` [N] of C = size tokens in an open mini-batch.

    Lengths that lie on the CPU are read, and the longest sequences are dealt out first, each to the
    lane that is free first. Lengths on another device are not waited for: there is one lane.
    """
    if not readable(cu_seqlens):
        return _one_lane(cu_seqlens.to(device, torch.int64).diff(), position, tokens, size)
    lengths = cu_seqlens.diff().tolist()
    # As many as there can be, where reading the positions would mean to wait.
    begun = [0 if position is None else size - 1] * len(lengths)
    if position is not None and readable(position):
        begun = position.tolist()
    needed = [-(-(n + p) // size) if n else 0 for n, p in zip(lengths, begun, strict=True)]
    # As many lanes as the longest sequence can be filled with.
    lanes = -(-sum(needed) // max(needed))
    free = [(0, lane) for lane in range(lanes)]
    lane, start = [0] * len(needed), [0] * len(needed)
    for n in sorted(range(len(needed)), key=lambda n: (-needed[n], n)):
        start[n], lane[n] = free[0]
        heapq.heapreplace(free, (start[n] + needed[n], lane[n]))
    owner = torch.full((max(end for end, _ in free), lanes), len(needed), device="cpu")
    for n, count in enumerate(needed):
        owner[start[n] : start[n] + count, lane[n]] = n
    plan = owner, torch.tensor(lane, device="cpu"), torch.tensor(start, device="cpu")
    return Lanes(*(x.to(device, non_blocking=True) for x in plan))


def _one_lane(counts: Tensor, position: Tensor | None, tokens: int, size: int) -> Lanes:
    """One after another, with as many steps as there can be."""
    held = min(tokens, len(counts))
    begun = 0 if position is None else position
    steps = tokens // size + held
    if position is not None:
        steps = (tokens + held * (2 * size - 2)) // size
    needed = torch.where(counts > 0, (begun + counts + size - 1) // size, 0)
    ends = needed.cumsum(0)
    step = torch.arange(steps, device=counts.device)
    owner = torch.searchsorted(ends, step, right=True)
    return Lanes(owner.unsqueeze(1), torch.zeros_like(ends), ends - needed)


class MiniBatches(NamedTuple):
    """M mini-batches of S slots in R rows: S = C, but a single token needs a single slot.

    The R rows are those of a batch, B = R, or lanes of a packed row, B = 1.
    """

    token: Tensor  # [B, R / B * M * S] token of each slot, some token where the slot is empty
    real: Tensor  # [M, R, S] which slots hold a token
    within: Tensor  # [M, R, S] place of each slot in its mini-batch, 0..C - 1
    place: Tensor  # [B, T] slot of each token
    owner: Tensor | None  # [M, R] of packed tokens, the sequence of each mini-batch; N for none

    @property
    def steps(self) -> int:
        return self.real.shape[0]

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, heads, ...] -> [M, R, heads, S, ...], zero in the empty slots."""
        steps, rows, slots = self.real.shape
        taken = take(x, self.token).reshape(rows, steps, slots, *x.shape[2:]).transpose(0, 1)
        real = self.real[(...,) + (None,) * (x.ndim - 2)]
        return taken.masked_fill(~real, 0).transpose(2, 3)

    def join(self, x: Tensor) -> Tensor:
        """[M, R, heads, S, C] -> [B, T, heads, C]."""
        rows = x.permute(1, 0, 3, 2, 4)
        return take(rows.reshape(*self.token.shape, *rows.shape[3:]), self.place)

    def completes(self, size: int) -> Tensor:
        """[M, R] whether the mini-batch of this many tokens is full."""
        return (self.real & (self.within == size - 1)).any(-1)

    def table(self, state: Tensor) -> Tensor:
        """[N, ...] or of a batch [R, ...] -> what `rows_at` reads and `write_at` writes."""
        if self.owner is None:
            return state
        # Idle lanes have rows of their own; and the given state stays as it was.
        return torch.cat([state, torch.zeros_like(state[:1])])

    def rows_at(self, step: int, table: Tensor) -> Tensor:
        """[R, ...] the states of the sequences whose mini-batches are computed at this step."""
        return table if self.owner is None else table.index_select(0, self.owner[step])

    def write_at(self, step: int, table: Tensor, rows: Tensor) -> Tensor:
        """Return the table with these rows; one that `table` made is written to in place."""
        return rows if self.owner is None else table.index_copy_(0, self.owner[step], rows)

    def states(self, table: Tensor) -> Tensor:
        return table if self.owner is None else table[:-1]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[r, index[r, i]]: [R, T, ...], [R, I] -> [R, I, ...]."""
    return torch.take_along_dim(x, index[(...,) + (None,) * (x.ndim - 2)], dim=1)


def lay_out(
    x: Tensor,
    size: int,
    *,
    position: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> MiniBatches:
    """Lay out the tokens of x [R, T, ...], T at least 1, in mini-batches of `size` = C tokens.

    `position` [N] says how many each sequence has in its open mini-batch (None: none), `lengths`
    [R] how many at the front of each row count (None: all); `cu_seqlens` are of packed sequences.
    """
    if cu_seqlens is not None:
        return _packed(x, size, position, cu_seqlens)
    rows, tokens = x.shape[:2]
    if position is None:
        position = torch.zeros(rows, dtype=torch.int64, device=x.device)
        steps = -(-tokens // size)
    else:
        steps = (tokens + 2 * size - 2) // size
    limit = tokens if lengths is None else lengths.unsqueeze(1)
    if tokens == 1:
        real = torch.zeros_like(position).unsqueeze(1) < limit
        zero = torch.zeros_like(position).unsqueeze(1)
        return MiniBatches(zero, real.unsqueeze(0), position[None, :, None], zero, None)
    slot = torch.arange(steps * size, device=x.device)
    token = slot - position.unsqueeze(1)
    real = ((token >= 0) & (token < limit)).unflatten(1, (steps, size)).transpose(0, 1)
    within = (slot % size).view(steps, 1, size).expand(steps, rows, size)
    place = position.unsqueeze(1) + torch.arange(tokens, device=x.device)
    return MiniBatches(token.clamp(0, tokens - 1), real, within, place, None)


def _packed(x: Tensor, size: int, position: Tensor | None, cu_seqlens: Tensor) -> MiniBatches:
    tokens, sequences = x.shape[1], len(cu_seqlens) - 1
    owner, lane, start = make_lanes(cu_seqlens, position, tokens, size, x.device)
    offsets = cu_seqlens.to(x.device, torch.int64)
    counts = offsets.diff()
    if position is None:
        position = torch.zeros_like(counts)
    steps, lanes = owner.shape
    known = owner.clamp(max=sequences - 1)
    step = torch.arange(steps, device=x.device).unsqueeze(1)
    within = torch.arange(size, device=x.device)
    local = ((step - start[known]) * size - position[known]).unsqueeze(-1) + within
    real = (local >= 0) & (local < counts[known].unsqueeze(-1)) & (owner < sequences).unsqueeze(-1)
    token = (offsets[known].unsqueeze(-1) + local).clamp(0, tokens - 1)
    each = torch.arange(tokens, device=x.device)
    own = sequence_of(offsets, tokens)
    slot = start[own] * size + position[own] + each - offsets[own]
    place = lane[own] * (steps * size) + slot
    token, within = token.transpose(0, 1).reshape(1, -1), within.expand(steps, lanes, size)
    return MiniBatches(token, real, within, place.unsqueeze(0), owner)


def next_position(
    position: Tensor, tokens: int, size: int, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """[N] tokens in each sequence's open mini-batch after this call."""
    if cu_seqlens is not None:
        return (position + cu_seqlens.to(position.device, position.dtype).diff()) % size
    return (position + (tokens if lengths is None else lengths)) % size
