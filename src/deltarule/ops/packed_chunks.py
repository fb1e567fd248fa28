"""The chunks of sequences that share one packed row, laid out as chunks.py says."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from deltarule.ops.chunks import Group, Packed, Window


def packed_groups(
    cu_seqlens: Tensor, tokens: int, size: int, window: int, device: torch.device
) -> list[Group]:
    if cu_seqlens.is_meta:
        # Shapes do not depend on the lengths, so the first sequence is given all tokens.
        offsets = tokens * np.arange(len(cu_seqlens)).clip(max=1)
    else:
        offsets = cu_seqlens.cpu().numpy().astype(np.int64)
    lengths = np.diff(offsets)
    # Compiled code and GPUs get here unchecked; a token that no sequence owns is never written.
    if offsets[0] != 0 or offsets[-1] != tokens or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {tokens} without a step back, "
            f"got {offsets.tolist()}"
        )
    counts = -(-lengths // size)
    first_chunk = np.cumsum(counts) - counts
    order = np.argsort(-counts, kind="stable")
    groups = []
    for start in range(0, len(order), window):
        sequences = order[start : start + window]
        windows = []
        for bounds, chunk_sequence, rank in _rank_windows(counts[sequences], window):
            source = sequences[chunk_sequence]
            left = lengths[source] - rank * size
            packed = _places(offsets[source] + rank * size, left, size, device)
            chunks = torch.from_numpy(first_chunk[source] + rank).to(device)
            windows.append(Window(bounds, chunks, slice(0, 1), slice(0, 0), packed))
        groups.append(Group(torch.from_numpy(sequences).to(device), windows))
    return groups


def _rank_windows(
    counts: np.ndarray, window: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Bounds, and each chunk's sequence and rank, for as many ranks at a time as make a window."""
    ranks = int(counts.max(initial=0))
    active = (counts[None, :] > np.arange(ranks)[:, None]).sum(1)
    start = 0
    while start < ranks:
        stop = start + 1
        while stop < ranks and active[start : stop + 1].sum() <= window:
            stop += 1
        here = active[start:stop]
        bounds = np.concatenate([[0], np.cumsum(here)])
        sequence = np.arange(bounds[-1]) - np.repeat(bounds[:-1], here)
        yield bounds.tolist(), sequence, np.repeat(np.arange(start, stop), here)
        start = stop


def _places(token: np.ndarray, left: np.ndarray, size: int, device: torch.device) -> Packed:
    """Places of chunks that start at `token` and have `left` tokens left in their sequence."""
    position = np.arange(size)
    filled = position < left[:, None]
    tokens = torch.from_numpy(np.where(filled, token[:, None] + position, token[:, None]).ravel())
    if filled.all():
        return Packed(tokens.to(device), None, None)
    empty, full = (torch.from_numpy(np.flatnonzero(mask)).to(device) for mask in (~filled, filled))
    return Packed(tokens.to(device), empty, full)
