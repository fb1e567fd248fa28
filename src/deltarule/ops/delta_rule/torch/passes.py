"""The whole recurrence in PyTorch: stages over the chunks of a window, forward and backward.

The tensors of a call go into chunks, through the stages, and their gradients back.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.chunks import Chunked, Window, chunk_size, cut, join, packed_sequences
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch.channel_scores import ChannelPairs
from deltarule.ops.delta_rule.torch.scores import (
    LOWEST,
    Corrected,
    Decay,
    HeadPairs,
    Rows,
    add,
    decay_backward,
    free,
    free_backward,
    row_sums,
    tied,
    tied_backward,
)

# Inputs cut into chunks: [M, H, G or 1, rows, channels], in the dtype of the state. q and k are of
# unit norm where that was asked, and q holds the scale. And gradients by them.
Chunks = Inputs


def window_elements(device: torch.device) -> int:
    """Most elements of a window's tensors: what a core's cache holds, or fills another device.

    It changes no result, bit by bit: chunks are independent but for the scan.
    """
    if device.type == "cpu":
        return max(16 * torch.get_num_threads(), 64) * 64 * 64
    return 2**25


def chunks_at_once(inputs: Inputs, size: int) -> int:
    rows = size * inputs.n_steps
    elements = inputs.v.shape[2] * rows * max(rows, *inputs.state_shape[2:])
    # Without an erase a chunk has half as many tensors.
    return window_elements(inputs.q.device) * (2 if inputs.erase == "none" else 1) // elements


def tokens_in_chunk(inputs: Inputs) -> int:
    packed = None if inputs.batch_invariant else packed_sequences(inputs)
    return chunk_size(inputs.q.shape[1], packed, inputs.n_steps)


def cut_inputs(inputs: Inputs, window: Window, size: int) -> Chunks:
    """Cut every stream; the empty places of a chunk decay, erase and write nothing."""
    chunks = inputs.each(lambda x, rows: _chunked(x, inputs, window, size, rows))
    q, k, log_decay = chunks.q, chunks.k, chunks.log_decay
    if inputs.normalize_qk:
        q, k = unit_norm(q), unit_norm(k)
    if log_decay is not None:
        log_decay.clamp_(min=LOWEST)
    return chunks._replace(q=q * inputs.scale, k=k)


def join_gradients(
    d: Chunks, inputs: Inputs, out: list[Tensor | None], window: Window, size: int
) -> None:
    """Write the gradients by the chunks into those by the inputs."""
    dq, dk, rows = d.q * inputs.scale, d.k, inputs.rows
    if inputs.normalize_qk:
        dq = unit_norm_backward(dq, _chunked(inputs.q, inputs, window, size, rows[0]))
        dk = unit_norm_backward(dk, _chunked(inputs.k, inputs, window, size, rows[1]))
    for dx, x, n in zip((dq, dk, *d[2:7]), out, rows, strict=True):
        if dx is not None and x is not None:
            join(dx.flatten(1, 2), x if x.ndim == 4 else x.unsqueeze(-1), window, size, n)


def _chunked(x: Tensor, inputs: Inputs, window: Window, size: int, n_steps: int) -> Tensor:
    x = x if x.ndim == 4 else x.unsqueeze(-1)
    return cut(x, window, size, n_steps, inputs.dtype).unflatten(1, (inputs.q.shape[2], -1))


# x / |x| for the rows of q and k, as a factor of each row.
#
# y = x r        r = (sum x^2 + 1e-6)^(-1/2)        dx = r (dy - y (y.dy))


EPSILON = 1e-6


def unit_norm(x: Tensor) -> Tensor:
    return x * _factor(x)


def unit_norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    factor = _factor(x)
    y = x * factor
    return factor * (dy - y * (y * dy).sum(-1, keepdim=True))


def _factor(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (norm * norm + EPSILON).rsqrt_()


# The scan over chunks, forward and backward: the one stage that is sequential.
#
#     X = x0 + from_state S^T        S <- S Diag(whole) + sum over writes of X^T y
#
# The backward walks the same chunks from the last to the first:
#
#     dX = d_x0 + y dS^T             dS <- dS Diag(whole) + d_read + dX^T from_state


class Write(NamedTuple):
    """Values X = x0 + from_state S^T (None: no such part), written along keys k."""

    k: Tensor
    x0: Tensor
    from_state: Tensor | None
    y: Rows  # k decayed to the end
    scores: Tensor  # of the queries against k


def next_state(
    writes: list[Write], whole: Tensor | None, state: Tensor, bounds: list[int], states: Tensor
) -> list[Tensor]:
    """Carry state [N, H, G, V, K], in place, through a window of chunks.

    Fills the states at each chunk's start [M, H, G, V, K] and returns the values X of each write.
    The longer sequences come first, and those that have ended keep their state.
    """
    values = [write.x0 for write in writes]
    # What needs no state is there at once for all chunks.
    written = [write.y.write(write.x0) for write in writes if write.from_state is None]
    for first, last in pairwise(bounds):
        here, running = slice(first, last), state[: last - first]
        states[here] = running
        if whole is not None:
            running *= whole[here]
        for x, write in zip(values, writes, strict=True):
            if write.from_state is not None:
                x[here] += write.from_state[here] @ states[here].mT
                running += write.y.part(here).write(x[here])
        for of_chunks in written:
            running += of_chunks[here]
    return values


def next_state_backward(
    d_values: list[Tensor],
    d_read: Tensor,
    writes: list[Write],
    whole: Tensor | None,
    d_state: Tensor,
    bounds: list[int],
) -> Tensor:
    """Carry the gradient of the state, in place, back through a window of chunks.

    d_values are the gradients of the values X by the outputs and become those by everything;
    d_read [M, H, G, V, K] are those of the states by the outputs. Returns the gradient of the
    state at each chunk's end.
    """
    d_ends = d_state.new_empty(bounds[-1], *d_state.shape[1:])
    for first, last in reversed(list(pairwise(bounds))):
        here, running = slice(first, last), d_state[: last - first]
        d_ends[here] = running
        if whole is not None:
            running *= whole[here]
        running += d_read[here]
        for dx, write in zip(d_values, writes, strict=True):
            if write.from_state is not None:
                dx[here] += write.y.part(here).read(d_ends[here])
                running += dx[here].mT @ write.from_state[here]
    # And those of values that no state changed, of all chunks.
    for dx, write in zip(d_values, writes, strict=True):
        if write.from_state is None:
            dx += write.y.read(d_ends)
    return d_ends


class Work(NamedTuple):
    """What forward and backward share of a window; no part of it depends on the state.

    The queries of a chunk read from the state at its start, and from the writes inside it:

        O = (q start) S^T + sum over writes of P X        P_ij = q_i.k_j between_ij, j <= i
    """

    decay: Decay
    corrected: Corrected | None
    reads: Rows
    writes: list[Write]


def _work(chunks: Chunks) -> Work:
    _, k, v, beta, a, b, log_decay = chunks[:7]
    decay = Decay(between=HeadPairs(None), between_before=HeadPairs(None))
    if log_decay is not None:
        pairs: Any = HeadPairs if log_decay.shape[-1] == 1 else ChannelPairs
        start, end = row_sums(log_decay, True), row_sums(log_decay, False, back=True)
        whole, between = log_decay.sum(-2, keepdim=True).exp_(), pairs.of(log_decay, True)
        decay = Decay(start.exp_(), end.exp_(), whole, between)
        if a is not None:
            start, between = row_sums(log_decay, False).exp_(), pairs.of(log_decay, False)
            decay = decay._replace(start_before=start, between_before=between)
    if beta is not None:
        corrected, keys = tied(chunks, decay), [k]
    elif b is not None:
        corrected, keys = free(chunks, decay), [b, k]
    else:
        corrected, keys = None, [k]
    values: list[tuple[Tensor, Tensor | None]] = [(v, None)] * len(keys)
    if corrected is not None:
        values[0] = corrected.x0, corrected.from_state
    writes = [
        Write(y, *x, Rows.of(y, decay.end), decay.between.scores(chunks.q, y, strict=False))
        for x, y in zip(values, keys, strict=True)
    ]
    return Work(decay, corrected, Rows.of(chunks.q, decay.start), writes)


def window_forward(chunks: Chunks, state: Tensor, states: Tensor, window: Window) -> Tensor:
    """Outputs of the chunks; the state goes to the end of the window, by way of `states`."""
    state, states = (x.unflatten(1, (chunks.q.shape[1], -1)) for x in (state, states))
    work = _work(chunks)
    values = next_state(work.writes, work.decay.whole, state, window.bounds, states)
    o = work.reads.read(states)
    for write, x in zip(work.writes, values, strict=True):
        o += write.scores @ x
    return o.flatten(1, 2)


def window_backward(
    d_o: Tensor, d_state: Tensor, chunks: Chunks, states: Tensor, window: Window
) -> Chunks:
    """Gradients by the chunks; d_state goes from the end of the window to its start."""
    d_o, d_state, states = (x.unflatten(1, (chunks.q.shape[1], -1)) for x in (d_o, d_state, states))
    q, work = chunks.q, _work(chunks)
    decay, writes = work.decay, work.writes
    values = [
        x0 if from_state is None else x0.add_(from_state @ states.mT)
        for _, x0, from_state, _, _ in writes
    ]
    d_values, d_read = [write.scores.mT @ d_o for write in writes], work.reads.write(d_o)
    d_ends = next_state_backward(d_values, d_read, writes, decay.whole, d_state, window.bounds)
    dq, d_start = work.reads.backward(d_o, states, q, decay.start)
    d_keys: list[Tensor] = []
    d_decay = Decay(d_start)
    for x, write in zip(values, writes, strict=True):
        of_pairs = decay.between.backward(d_o @ x.mT, write.scores, q, write.k, strict=False)
        dy, d_end = write.y.backward(x, d_ends, write.k, decay.end)
        dq = dq + of_pairs[0]
        d_keys.append(of_pairs[1] + dy)
        d_decay = add(d_decay, Decay(end=d_end, between=of_pairs[2]))
    if decay.whole is not None:
        d_whole = (states * d_ends).sum(-2, keepdim=True) * decay.whole
        d_decay = d_decay._replace(whole=d_whole.sum_to_size(decay.whole.shape))
    # What comes through the corrected values.
    dk, dv, d_beta, da, db = d_keys[-1], d_values[-1], None, None, None
    if work.corrected is not None:
        seen = d_values[0], values[0], states, work.corrected, chunks, decay
        if chunks.beta is not None:
            dk_erase, dv, d_beta, d_erase = tied_backward(*seen)
            dk = dk + dk_erase
        else:
            da, db, dk_erase, dv_erase, d_erase = free_backward(*seen)
            dk, dv, db = dk + dk_erase, dv + dv_erase, db + d_keys[0]
        d_decay = add(d_decay, d_erase)
    return Chunks(dq, dk, dv, d_beta, da, db, decay_backward(d_decay, dq.shape[-2]))


chunked = Chunked(
    tokens_in_chunk, chunks_at_once, cut_inputs, window_forward, window_backward, join_gradients
)


def forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states at the starts of the chunks (none without `save`)."""
    o, final_state, saved = chunked.run(inputs, save)
    # A number that is not finite, given or of an overflow, may have reached earlier tokens, by the
    # zeros of a mask. A sum shows it on a CPU, where that needs no waiting.
    whole = o.device.type != "cpu" or all(
        x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite()
        for x in (o, final_state)
    )
    if not whole:
        # A chunk of one token has no earlier ones. What was finite keeps its bits.
        alone, last, _ = chunked.run(inputs, False, 1)
        o = torch.where(o.isfinite(), o, alone)
        final_state = torch.where(final_state.isfinite(), final_state, last)
    return o, final_state, saved
