"""Cut sequences into chunks, and the chunks into windows that fit a cache.

Sequences with the most chunks come first. In a group of them, the r-th chunks of all lie together,
so that a scan over r reads slices, and sequences that have ended are at the end of each slice.
"""

from typing import NamedTuple

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
    chunks: Tensor | slice  # which they are of all chunks, counted sequence by sequence
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
            several = (rank[:, None] + first_chunks).flatten()
            chunks = slice(row * ranks + start, row * ranks + stop) if count == 1 else several
            part = slice(start * size, min(stop * size, tokens))
            windows.append(Window(bounds, chunks, rows, part, None))
        groups.append(Group(rows, windows))
    return groups


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
