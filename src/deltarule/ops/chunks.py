"""Cut sequences into chunks, and the chunks into windows that fit a cache.

Sequences with the most chunks come first. In a group of them, the r-th chunks of all lie together,
so that a scan over r reads slices, and sequences that have ended are at the end of each slice.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 64


class Packed(NamedTuple):
    """Places of a window's tokens in the one packed row: chunk by chunk, `size` places each."""

    tokens: Tensor  # token of each place; some token where the place is empty
    empty: Tensor | None  # places without a token; None where there are none
    full: Tensor | None  # the other places


class Window(NamedTuple):
    """Chunks that are computed at once; bounds[r] to bounds[r + 1] are those of rank r."""

    bounds: list[int]
    chunks: Tensor  # which they are of all chunks, counted sequence by sequence
    rows: slice  # batch rows, of a batch
    tokens: slice  # tokens of those rows
    packed: Packed | None  # or where they lie in a packed row


class Group(NamedTuple):
    """Sequences that go through the scan together, and their windows in order."""

    sequences: slice | Tensor
    windows: list[Window]


def chunk_size(mean_tokens: int, n_steps: int) -> int:
    """Tokens in a chunk: a power of two, smaller where sequences are short or tokens have steps."""
    size = 1
    while size < mean_tokens and 2 * size * n_steps <= CHUNK_ROWS:
        size *= 2
    return size


def chunk_count(batch: int, tokens: int, sequences: int | None, size: int) -> int:
    """The most chunks there can be; packed sequences may need fewer, by where they end."""
    if sequences is None:
        return batch * -(-tokens // size)
    return tokens // size + min(sequences, tokens)


def batch_groups(
    batch: int, tokens: int, size: int, window: int, device: torch.device
) -> list[Group]:
    """Lay out the rows of a batch, with `window` chunks at once."""
    groups = []
    ranks, together = -(-tokens // size), max(min(batch, window), 1)
    for row in range(0, batch, together):
        rows = slice(row, min(row + together, batch))
        first_chunks = torch.arange(rows.start, rows.stop, device=device) * ranks
        count, windows, step = rows.stop - row, [], max(window // together, 1)
        for start in range(0, ranks, step):
            stop = min(start + step, ranks)
            bounds = [count * rank for rank in range(stop - start + 1)]
            rank = torch.arange(start, stop, device=device)
            chunks = (rank[:, None] + first_chunks).flatten()
            part = slice(start * size, min(stop * size, tokens))
            windows.append(Window(bounds, chunks, rows, part, None))
        groups.append(Group(rows, windows))
    return groups


def packed_groups(
    cu_seqlens: Tensor, tokens: int, size: int, window: int, device: torch.device
) -> list[Group]:
    """Lay out the sequences of one packed row, with about `window` chunks at once."""
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


def cut(x: Tensor, window: Window, size: int, n_steps: int, dtype: torch.dtype) -> Tensor:
    """[B, T*n, heads, C] -> [M, heads, size*n, C] in `dtype`; places without a token hold zeros."""
    if window.packed is None:
        start, stop = window.tokens.start * n_steps, window.tokens.stop * n_steps
        part = x[window.rows, start:stop]
        missing = (start - stop) % (size * n_steps)
        part = F.pad(part, (0, 0, 0, 0, 0, missing)) if missing else part
        chunked = part.unflatten(1, (-1, size * n_steps)).permute(1, 0, 3, 2, 4)
    else:
        rows = x[0].unflatten(0, (-1, n_steps)).index_select(0, window.packed.tokens)
        if window.packed.empty is not None:
            rows.index_fill_(0, window.packed.empty, 0)
        chunked = rows.flatten(0, 1).unflatten(0, (-1, 1, size * n_steps)).transpose(2, 3)
    out = torch.empty(chunked.shape, dtype=dtype, device=x.device)
    return out.copy_(chunked).flatten(0, 1)


def join(x: Tensor, out: Tensor, window: Window, size: int, n_steps: int) -> None:
    """The inverse of `cut`: write [M, heads, size*n, C] into out [B, T*n, heads, C]."""
    if window.packed is None:
        rows = window.rows.stop - window.rows.start
        part = x.unflatten(0, (-1, rows)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        start, stop = window.tokens.start * n_steps, window.tokens.stop * n_steps
        out[window.rows, start:stop] = part[:, : stop - start].to(out.dtype)
        return
    tokens, _, full = window.packed
    places = x.transpose(1, 2).unflatten(1, (size, n_steps)).flatten(0, 1)
    if full is not None:
        places, tokens = places.index_select(0, full), tokens.index_select(0, full)
    out[0].unflatten(0, (-1, n_steps)).index_copy_(0, tokens, places.to(out.dtype))
