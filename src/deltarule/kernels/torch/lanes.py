"""Which packed sequences are computed side by side: lanes, one sequence after another in each.

Lengths that lie on the CPU are read, and the longest sequences are dealt out first, each to the
lane that is free first. Lengths on another device are not waited for: there is one lane.
"""

import heapq
from typing import NamedTuple

import torch
from torch import Tensor


class Lanes(NamedTuple):
    """Where each of N sequences has its mini-batches, on the device of the tokens."""

    owner: Tensor  # [M, R] the sequence of each mini-batch; N where the lane is idle
    lane: Tensor  # [N] the lane of each sequence
    start: Tensor  # [N] its first step there


def make_lanes(
    cu_seqlens: Tensor, position: Tensor | None, tokens: int, size: int, device: torch.device
) -> Lanes:
    """Schedule sequences that have `position` [N] of C = size tokens in an open mini-batch."""
    if readable(cu_seqlens):
        lengths = cu_seqlens.diff().tolist()
        # As many as there can be, where reading the positions would mean to wait.
        begun = [0 if position is None else size - 1] * len(lengths)
        if position is not None and readable(position):
            begun = position.tolist()
        needed = [-(-(n + p) // size) if n else 0 for n, p in zip(lengths, begun, strict=True)]
        return _side_by_side(needed, device)
    return _one_lane(cu_seqlens.to(device, torch.int64).diff(), position, tokens, size)


def readable(x: Tensor) -> bool:
    """Whether reading the values costs no waiting, and is allowed."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _side_by_side(needed: list[int], device: torch.device) -> Lanes:
    """Longest first, into as many lanes as the longest sequence can be filled with."""
    lanes = -(-sum(needed) // max(needed))
    free = [(0, lane) for lane in range(lanes)]
    lane, start = [0] * len(needed), [0] * len(needed)
    for n in sorted(range(len(needed)), key=lambda n: (-needed[n], n)):
        start[n], lane[n] = free[0]
        heapq.heapreplace(free, (start[n] + needed[n], lane[n]))
    owner = torch.full((max(end for end, _ in free), lanes), len(needed), dtype=torch.int64)
    for n, count in enumerate(needed):
        owner[start[n] : start[n] + count, lane[n]] = n
    plan = owner, torch.tensor(lane), torch.tensor(start)
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
