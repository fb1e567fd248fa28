"""Complex channels with constant factors, chunk by chunk, by matrix products.

h_t = a h_{t-1} + b u_t        y_t = 2 Re(sum over n of c h_t)        a, b, c of each value channel

In a chunk of C tokens from the state h_0, with the filter F_l = 2 Re(sum of c a^l b),

    y_i = sum over j <= i of F_{i-j} u_j + 2 Re(sum of c a^{i+1} h_0)
    h_n = a^n h_0 + sum over j < n of a^{n-1-j} b u_j

The states between chunks are those of `selective_scan` over the chunks, in a frame that turns with
them. A complex number is two channels, one in each half of an axis.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule import ops
from deltarule.nn.gates import computed
from deltarule.nn.layout import Layout
from deltarule.nn.rotation import in_float64, turned, within_a_turn
from deltarule.nn.rule import Arguments
from deltarule.ops.chunks import chunk_size
from deltarule.ops.context import Context
from deltarule.ops.context.exchange import starting_state


class Filters(NamedTuple):
    """a = exp(log_decay + i angle), b and c: [H, V, K], b and c of complex numbers."""

    log_decay: Tensor
    angle: Tensor
    b: Tensor
    c: Tensor

    def power(self, exponents: Tensor) -> Tensor:
        """a^n [.., H, V, 2 K] of integers [..]."""
        n = exponents.view(*exponents.shape, 1, 1, 1)
        size = torch.exp(n * self.log_decay)
        angle = within_a_turn(in_float64(n) * in_float64(self.angle), size.dtype)
        return torch.cat([size * angle.cos(), size * angle.sin()], dim=-1)


def complex_product(x: Tensor, y: Tensor) -> Tensor:
    (a, b), (c, d) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    return torch.cat([a * c - b * d, a * d + b * c], dim=-1)


class Chunks(NamedTuple):
    """Where the tokens of N sequences lie among M chunks of `size`, each of one sequence.

    Args:
        size: Tokens in a chunk, C.
        number: Chunks, M; those that no sequence needs are a sequence of their own.
        places: [B, T] of each token among the M C places; those of padding are M C.
        offsets: [N + 1] the first chunk of each sequence, and the one after the last.
        tokens: [N] of each sequence.
        packed: Whether sequences have numbers of chunks of their own.
    """

    size: int
    number: int
    places: Tensor
    offsets: Tensor
    tokens: Tensor
    packed: bool


def chunks_of(layout: Layout) -> Chunks:
    """Cut what is real of a layout."""
    counts, token = layout.counts, torch.arange(layout.tokens, device=layout.device)
    size = chunk_size(-(-layout.batch * layout.tokens // max(layout.sequences, 1)), 1)
    if layout.cu_seqlens is None or layout.sequence is None:
        each = -(-layout.tokens // size)
        offsets = torch.arange(layout.sequences + 1, device=layout.device) * each
        places, count = offsets[:-1, None] * size + token, layout.sequences * each
        if layout.real is not None:
            places = places.masked_fill(~layout.real, count * size)
        return Chunks(size, count, places, offsets, counts, packed=False)
    needed = -(-counts // size)
    count = layout.tokens // size + layout.sequences
    offsets = torch.cat([needed.new_zeros(1), needed.cumsum(0)])
    within = token - layout.cu_seqlens[layout.sequence]
    places = (offsets[layout.sequence] * size + within)[None]
    return Chunks(size, count, places, offsets, counts, packed=True)


def filtered(u: Tensor, filters: Filters, state: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] of u, in float32 at least, and the state [N, H, V, 2 K] after that before."""
    cut = chunks_of(layout)
    if layout.context is not None:
        state = state_over_context(u, filters, state, cut, layout.context)
    return in_chunks(u, filters, state, cut)


def in_chunks(u: Tensor, filters: Filters, state: Tensor, cut: Chunks) -> tuple[Tensor, Tensor]:
    """The same result in chunks, continued from the given states."""
    power = filters.power(torch.arange(cut.size + 1, device=u.device))
    rows = to_chunks(computed(u), cut)
    if cut.number == 0:
        return computed(u), state.clone()
    written = weighed(rows, complex_product(power[:-1].flip(0), filters.b))
    starts = chunk_starts(written, filters, state, cut)
    read = complex_product(power, filters.c)
    taps = 2 * complex_product(read[:-1], filters.b)[..., : filters.angle.shape[-1]].sum(-1)
    i = torch.arange(cut.size, device=u.device)
    lag = i[:, None] - i
    toeplitz = taps[lag.clamp(min=0)].masked_fill((lag < 0)[..., None, None], 0)
    y = torch.einsum("ijhv, mjhv -> mihv", toeplitz, rows)
    signs = torch.ones_like(read[0]).chunk(2, dim=-1)
    real_part = 2 * torch.cat([signs[0], -signs[1]], dim=-1) * read[1:]
    y = y + torch.einsum("ihvk, mhvk -> mihv", real_part, starts)
    return from_chunks(y, cut), final_state(rows, filters, starts, state, power, cut)


def to_chunks(u: Tensor, cut: Chunks) -> Tensor:
    """[M, C, H, V]: tokens in their places, zeros elsewhere."""
    rows = u.new_zeros(cut.number * cut.size + 1, *u.shape[2:])
    rows = rows.index_copy(0, cut.places.flatten(), u.flatten(0, 1))
    return rows[:-1].unflatten(0, (cut.number, cut.size))


def from_chunks(y: Tensor, cut: Chunks) -> Tensor:
    """[B, T, H, V] of tokens in their places; padding reads what comes last."""
    rows = y.flatten(0, 1)
    places = cut.places.clamp(max=len(rows) - 1)
    return rows.index_select(0, places.flatten()).unflatten(0, places.shape)


def weighed(rows: Tensor, weights: Tensor) -> Tensor:
    """[M, H, V, 2 K] sum over the tokens of a chunk: rows [M, C, H, V], weights [C, H, V, 2 K]."""
    return torch.einsum("mjhv, jhvk -> mhvk", rows, weights)


def chunk_starts(written: Tensor, filters: Filters, state: Tensor, cut: Chunks) -> Tensor:
    """[M, H, V, 2 K] the state before each chunk, from what each alone would leave."""
    chunk = torch.arange(cut.number, device=written.device)
    own = torch.searchsorted(cut.offsets[1:], chunk, right=True).clamp(max=len(state) - 1)
    place = chunk - cut.offsets[own]
    turn = in_float64(place + 1).view(-1, 1, 1, 1) * in_float64(filters.angle) * cut.size
    turn = within_a_turn(turn, written.dtype)
    writes = turned(written, -turn).flatten(-2)
    decay = (cut.size * filters.log_decay).repeat(1, 1, 2).flatten(-2)
    one, before, offsets = writes.new_ones(*decay.shape, 1), state, None
    if cut.packed:
        # What lies behind the last sequence is one more.
        before = torch.cat([state, torch.zeros_like(state[:1])])
        offsets = torch.cat([cut.offsets, cut.offsets.new_full((1,), cut.number)])
    writes = writes.unflatten(0, (1 if cut.packed else len(state), -1))
    decays, start = decay.expand(writes.shape).contiguous(), before.flatten(-2).unsqueeze(-1)
    given: Arguments = {"q": one, "k": one, "v": writes, "value_log_decay": decays, "scale": 1.0}
    ends = ops.selective_scan(**given, initial_state=start, cu_seqlens=offsets).o
    ends = turned(ends.view_as(written), turn)
    earlier = torch.cat([ends[:1], ends[:-1]])
    return torch.where((place == 0).view(-1, 1, 1, 1), state[own], earlier)


def final_state(
    rows: Tensor, filters: Filters, starts: Tensor, state: Tensor, power: Tensor, cut: Chunks
) -> Tensor:
    """[N, H, V, 2 K] after the last token of each sequence, which may end within its last chunk."""
    empty = (cut.tokens == 0).view(-1, 1, 1, 1)
    last = cut.offsets[:-1] + (cut.tokens - 1).clamp(min=0) // cut.size
    last = last.clamp(max=cut.number - 1)
    tokens = cut.tokens - (last - cut.offsets[:-1]) * cut.size
    # The tokens at the end of a chunk of their own: what is before them are zeros.
    place = torch.arange(cut.size, device=rows.device) - (cut.size - tokens)[:, None]
    own = rows[last[:, None], place.clamp(min=0)].masked_fill((place < 0)[..., None, None], 0)
    written = weighed(own, complex_product(power[:-1].flip(0), filters.b))
    after = complex_product(power[tokens.clamp(0, cut.size)], starts[last]) + written
    return torch.where(empty, state, after)


def state_over_context(
    u: Tensor, filters: Filters, state: Tensor, cut: Chunks, context: Context
) -> Tensor:
    """[N, H, V, 2 K] the states before the tokens here, by way of the processes before this one.

    Turned back to the first token of the row, a state is multiplied by real numbers alone.
    """
    _, ends = in_chunks(u, filters, state, cut)
    first, tail = len(u), context.last - context.first - context.tail
    here, there = (
        within_a_turn(in_float64(filters.angle) * place, ends.dtype)
        for place in (context.first, context.last)
    )
    kept = torch.exp(tail * filters.log_decay) * float(context.goes_on and context.tail == 0)
    kept = kept.repeat(1, 1, 2).expand(first, -1, -1, -1).contiguous()
    before = starting_state(context, turned(ends[-first:], -there), kept)
    return torch.cat([state[:first] + turned(before, here), state[first:]])
