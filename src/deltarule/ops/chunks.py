"""Recurrences in PyTorch: sequences cut into chunks, and these into windows that fit a cache.

Sequences with the most chunks come first. In a group of them, the r-th chunks of all lie together,
so that a scan over r reads slices, and sequences that have ended are at the end of each slice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.dispatch import without_autocast

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


def chunk_size(tokens: int, packed: int | None, n_steps: int = 1) -> int:
    """Tokens in a chunk of a row: a power of two, up to 64 rows of the writes of its tokens.

    It is smaller where a row, or on average the sequences `packed` into one (None: none), is short.
    """
    size, mean = 1, -(-tokens // packed) if packed else tokens
    while size < mean and 2 * size * n_steps <= CHUNK_ROWS:
        size *= 2
    return size


def packed_sequences(inputs: Any) -> int | None:
    return None if inputs.cu_seqlens is None else inputs.sequences


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


class Chunked(NamedTuple):
    """A recurrence as a loop over windows of chunks, forwards and backwards.

    A state is [N, HV, V, K], the states at the chunks' starts [M, HV, V, K].
    """

    # Tokens in a chunk, and how many of that size a window has.
    size: Callable[[Any], int]
    together: Callable[[Any, int], int]
    # What the chunks of a window are given.
    cut: Callable[[Any, Window, int], Any]
    # Outputs. The state goes to the window's end, and those at the chunks' starts are filled in.
    forward: Callable[[Any, Tensor, Tensor, Window], Tensor]
    # From gradients by outputs and state, which goes to the window's start, those by what was cut.
    backward: Callable[[Tensor, Tensor, Any, Tensor, Window], Any]
    # Writes these into gradients by the inputs, or adds them to those of what is constant.
    join: Callable[[Any, Any, list[Tensor | None], Window, int], None]

    def plan(self, inputs: Any, size: int) -> list[Group]:
        (batch, tokens), device = inputs.output_shape[:2], inputs.v.device
        together = max(self.together(inputs, size), 1)
        if inputs.cu_seqlens is None:
            return batch_groups(batch, tokens, size, together, device)
        # What only packed sequences need.
        from deltarule.ops.packed_chunks import packed_groups

        return packed_groups(inputs.cu_seqlens, tokens, size, together, device)

    def saved_shape(self, inputs: Any) -> tuple[int, ...]:
        """[M, HV, V, K]: the most chunks there can be; packed sequences may have fewer."""
        (batch, tokens), size = inputs.output_shape[:2], self.size(inputs)
        chunks, packed = batch * -(-tokens // size), packed_sequences(inputs)
        if packed is not None:
            chunks = tokens // size + min(packed, tokens)
        return chunks, *inputs.state_shape[1:]

    def run(
        self, inputs: Any, save: bool, size: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, final state, and the states at the chunks' starts (none without `save`).

        Chunks have the usual `size`; those of another are not saved.
        """
        o = inputs.v.new_empty(inputs.output_shape)
        final_state = inputs.v.new_zeros(inputs.state_shape, dtype=inputs.dtype)
        if inputs.initial_state is not None:
            final_state.copy_(inputs.initial_state)
        # There may be fewer chunks of packed sequences than places for them.
        empty = final_state.new_empty if inputs.cu_seqlens is None else final_state.new_zeros
        saved = empty(self.saved_shape(inputs) if save else (0, *inputs.state_shape[1:]))
        size = size or self.size(inputs)
        with without_autocast(o.device):
            for sequences, windows in self.plan(inputs, size):
                state = final_state[sequences]
                for window in windows:
                    # The states of chunks side by side are computed where they are kept.
                    kept = save and isinstance(window.chunks, slice)
                    shape = window.bounds[-1], *state.shape[1:]
                    states = saved[window.chunks] if kept else state.new_empty(shape)
                    chunks = self.cut(inputs, window, size)
                    join(self.forward(chunks, state, states, window), o, window, size, 1)
                    if save and not kept:
                        saved[window.chunks] = states
                final_state[sequences] = state
        return o, final_state, saved

    def gradients(
        self, d_o: Tensor, d_final: Tensor | None, inputs: Any, saved: Tensor, spent: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Gradients by the first inputs and by initial_state; None for what is None.

        None in place of d_final stands for zeros. Without saved states the forward runs once more.
        """
        if saved.numel() == 0:
            saved = self.run(inputs, save=True)[2]
        found, size = room_for_gradients(inputs), self.size(inputs)
        d_initial = inputs.v.new_zeros(inputs.state_shape, dtype=inputs.dtype)
        if d_final is not None:
            d_initial.copy_(d_final)
        with without_autocast(d_o.device):
            for sequences, windows in self.plan(inputs, size):
                d_state = d_initial[sequences]
                for window in reversed(windows):
                    chunks = self.cut(inputs, window, size)
                    d_part = cut(d_o, window, size, 1, inputs.dtype)
                    states = saved[window.chunks]
                    d_chunks = self.backward(d_part, d_state, chunks, states, window)
                    self.join(d_chunks, inputs, found, window, size)
                d_initial[sequences] = d_state
        given = [None if d is None else d.to(x.dtype) for d, x in zip(found, inputs, strict=False)]
        return *given, None if inputs.initial_state is None else d_initial


def room_for_gradients(inputs: Any) -> list[Tensor | None]:
    """By the inputs before initial_state; None for what is None."""
    found: list[Tensor | None] = []
    for x in inputs[: inputs._fields.index("initial_state")]:
        if x is not None and x.shape == inputs.state_shape[1:]:
            # The gradient of a constant is a sum over all tokens: in 16 bits it would stop growing.
            found.append(x.new_zeros(x.shape, dtype=inputs.dtype))
        else:
            found.append(None if x is None else x.new_empty(x.shape))
    return found
