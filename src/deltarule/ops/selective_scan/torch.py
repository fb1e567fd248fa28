"""The state that decays entry by entry, chunk by chunk: forward and backward, any device.

Chunks run side by side, their tokens one after another, so that no more than the states of one
token of each chunk are in memory; the backward pass keeps those of the tokens of one window.

    decay_t = exp(delta_t A + value_log_decay_t 1^T + 1 log_decay_t^T) * (1 - beta_t k_t^2^T)
              or signed, 2 exp(..) - 1 in place of exp(..)
    S_t = decay_t * S_{t-1} + w_t k_t^T        w_t = v_t or beta_t * v_t        o_t = S_t q_t
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.chunks import Chunked, Window, chunk_size, cut, join, packed_sequences
from deltarule.ops.dispatch import without_autocast
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.shapes import RecurrentOutput

# The arguments cut into chunks, q times the scale: [M, HV, C, channels], or [HV, V, K] where
# constant over time. And gradients by them.
Chunks = ScanInputs


def window_elements(device: torch.device) -> int:
    """Most numbers in the states of a window's tokens, all of which the backward pass keeps."""
    return 2**22 if device.type == "cpu" else 2**26


def chunks_at_once(inputs: ScanInputs, size: int) -> int:
    return window_elements(inputs.v.device) // (math.prod(inputs.state_shape[1:]) * size)


def tokens_in_chunk(inputs: ScanInputs) -> int:
    """The average number of tokens of a sequence, at most 64."""
    return chunk_size(inputs.v.shape[1], packed_sequences(inputs))


def cut_inputs(inputs: ScanInputs, window: Window, size: int) -> Chunks:
    return for_heads(inputs, lambda x: cut(x, window, size, 1, inputs.dtype))


def for_heads(inputs: ScanInputs, rows: Callable[[Tensor], Tensor]) -> Chunks:
    """The arguments as rows [M, heads, C, channels] of every value head."""
    found: dict[str, Any] = {}
    for name, x in zip(inputs._fields[:8], inputs[:8], strict=True):
        if x is not None:
            wide = x.to(inputs.dtype) if x.ndim == 3 else rows(x)
            sharing = 1 if x.ndim == 3 else inputs.v.shape[2] // x.shape[2]
            found[name] = wide if sharing == 1 else wide.repeat_interleave(sharing, dim=1)
    found["q"] = found["q"] * inputs.scale
    return inputs._replace(**found)


def join_gradients(
    d: Chunks, inputs: ScanInputs, out: list[Tensor | None], window: Window, size: int
) -> None:
    """Write the gradients by the chunks into those by the inputs, or add them to a constant's."""
    for dx, to in zip(d._replace(q=d.q * inputs.scale)[:8], out, strict=True):
        if dx is None or to is None:
            continue
        if to.ndim == 3:
            to += dx
        else:
            join(dx.unflatten(1, (to.shape[2], -1)).sum(2), to, window, size, 1)


def window_forward(chunks: Chunks, state: Tensor, states: Tensor, window: Window) -> Tensor:
    """Outputs of the chunks; the state goes to the end of the window."""
    between_chunks(chunks, state, window.bounds, states)
    o, ends = read(chunks, states)
    # A sequence has the state at the end of its last chunk here.
    for first, stop in pairwise(window.bounds):
        state[: stop - first] = ends[first:stop]
    return o


def window_backward(
    d_o: Tensor, d_state: Tensor, chunks: Chunks, states: Tensor, window: Window
) -> Chunks:
    """Gradients by the chunks; d_state goes from the end of the window to its start."""
    d_ends = torch.empty_like(states)
    between_chunks(chunks, d_state, window.bounds, d_ends, d_o)
    d_chunks, d_starts = read_backward(d_o, d_ends, chunks, states)
    # And the gradient at the start of its first chunk.
    first = window.bounds[1]
    d_state[:first] = d_starts[:first]
    return d_chunks


chunked = Chunked(
    tokens_in_chunk, chunks_at_once, cut_inputs, window_forward, window_backward, join_gradients
)


def decay(chunks: Chunks, t: int, with_erase: bool = True) -> Tensor:
    """[M, HV, V or 1, K or 1] the factor of the state at the t-th token of every chunk.

    e = exp(delta A + value_log_decay 1^T + 1 log_decay^T) or, signed, 2 e - 1; and if
    `with_erase` times (1 - beta k^2^T)
    """
    factors = []
    if chunks.delta is not None and chunks.A is not None:
        factors.append((chunks.delta[:, :, t, :, None] * chunks.A).exp())
    # Of channels alone: far fewer exponentials than entries.
    if chunks.value_log_decay is not None:
        factors.append(chunks.value_log_decay[:, :, t, :, None].exp())
    if chunks.log_decay is not None:
        factors.append(chunks.log_decay[:, :, t, None].exp())
    factor = math.prod(factors[1:], start=factors[0]) if factors else chunks.v.new_ones(1, 1, 1, 1)
    if chunks.signed:
        factor = 2 * factor - 1
    return factor * erase(chunks, t) if with_erase and chunks.beta is not None else factor


def erase(chunks: Chunks, t: int) -> Tensor | float:
    if chunks.beta is None:
        return 1.0
    return 1 - chunks.beta[:, :, t, :, None] * at(chunks.k, t).square()


def at(x: Tensor, t: int) -> Tensor:
    """The t-th key or query of every chunk, [M, HV, 1, K], or [HV, V, K] where constant."""
    return x if x.ndim == 3 else x[:, :, t, None]


def written(chunks: Chunks) -> Tensor:
    """w [M, HV, C, V]: v, or beta * v."""
    return chunks.v if chunks.beta is None else chunks.beta * chunks.v


def between_chunks(
    chunks: Chunks, given: Tensor, bounds: list[int], found: Tensor, d_o: Tensor | None = None
) -> None:
    """Fill in the states at the starts of the chunks [M, HV, V, K], from those before the window.

    Of d_o: the gradients by the states at their ends, from those after the window.
    """
    if len(bounds) == 2:
        found.copy_(given[: bounds[1]])
        return
    # What each chunk makes of a state of zeros, and what is left of any other.
    write, local, left = written(chunks), torch.zeros_like(found), torch.ones_like(found)
    tokens, ranks = range(write.shape[2]), list(pairwise(bounds))
    for t in tokens if d_o is None else reversed(tokens):
        factor = decay(chunks, t)
        if d_o is None:
            local.mul_(factor).addcmul_(write[:, :, t, :, None], at(chunks.k, t))
        else:
            local.addcmul_(d_o[:, :, t, :, None], at(chunks.q, t)).mul_(factor)
        left.mul_(factor)
    carried = given.clone()
    for first, stop in ranks if d_o is None else reversed(ranks):
        here = slice(first, stop)
        found[here] = carried[: stop - first]
        torch.addcmul(local[here], left[here], found[here], out=carried[: stop - first])


def read(chunks: Chunks, starts: Tensor) -> tuple[Tensor, Tensor]:
    """o [M, HV, C, V], and the state at the end of every chunk."""
    write, state = written(chunks), starts
    o = torch.empty_like(write)
    for t in range(write.shape[2]):
        # What is given stays as it was.
        kept = state.mul_(decay(chunks, t)) if t else state * decay(chunks, t)
        state = kept.addcmul_(write[:, :, t, :, None], at(chunks.k, t))
        o[:, :, t] = (state * at(chunks.q, t)).sum(-1)
    return o, state


def read_backward(
    d_o: Tensor, d_ends: Tensor, chunks: Chunks, starts: Tensor
) -> tuple[Chunks, Tensor]:
    """Gradients by the chunks, and by the states at their starts."""
    # The state before each token of a chunk, and after the last.
    write, states = written(chunks), [starts]
    for t in range(write.shape[2]):
        state = states[-1] * decay(chunks, t)
        states.append(state.addcmul_(write[:, :, t, :, None], at(chunks.k, t)))
    zeros: Any = [None if x is None else torch.zeros_like(x) for x in chunks[:8]]
    d = ScanInputs._make((*zeros, *chunks[8:]))
    d_write, d_state = torch.zeros_like(write), d_ends.clone()
    state = states.pop()
    for t in reversed(range(write.shape[2])):
        d_now, value = d_o[:, :, t, :, None], write[:, :, t, :, None]
        d_state.addcmul_(d_now, at(chunks.q, t))
        add_at(d.q, t, d_now * state)
        add_at(d.k, t, d_state * value)
        d_write[:, :, t] = (d_state * at(chunks.k, t)).sum(-1)
        state = states.pop()
        factor = decay(chunks, t)
        decay_backward(d_state * state, factor, chunks, d, t)
        d_state.mul_(factor)
    if chunks.beta is None or d.beta is None:
        return d._replace(v=d_write), d_state
    return d._replace(v=d_write * chunks.beta, beta=d.beta + d_write * chunks.v), d_state


def decay_backward(d_factor: Tensor, factor: Tensor, chunks: Chunks, d: Chunks, t: int) -> None:
    """Add what comes through the factor of the state, [M, HV, V, K], to the gradients.

    With e = exp(exponent) and b = beta k^2^T:
        d exponent = d factor * e (1 - b)        d b = -d factor * e
    and signed, with f = 2 e - 1 in place of e: d exponent = d factor * (f + 1) (1 - b).
    """
    d_exponent = d_factor * factor
    if chunks.signed:
        d_exponent = d_exponent + d_factor * erase(chunks, t)
    if d.delta is not None and d.A is not None:
        assert chunks.delta is not None
        assert chunks.A is not None
        d.delta[:, :, t] = (d_exponent * chunks.A).sum(-1)
        d.A.add_((d_exponent * chunks.delta[:, :, t, :, None]).sum(0))
    if d.value_log_decay is not None:
        d.value_log_decay[:, :, t] = d_exponent.sum(-1)
    if d.log_decay is not None:
        d.log_decay[:, :, t] = d_exponent.sum(-2)
    if d.beta is not None and chunks.beta is not None:
        key, d_erase = at(chunks.k, t), d_factor * decay(chunks, t, with_erase=False)
        d.beta[:, :, t] = -(d_erase * key.square()).sum(-1)
        add_at(d.k, t, d_erase * chunks.beta[:, :, t, :, None] * -2 * key)


def add_at(d: Tensor, t: int, dx: Tensor) -> None:
    """Add [M, HV, V, K] to the gradient by the t-th key or query, or by one constant over time."""
    if d.ndim == 3:
        d += dx.sum(0)
    else:
        d[:, :, t] += dx.sum(-2)


def step(inputs: ScanInputs) -> RecurrentOutput:
    """A few tokens, one after another, for a state without a gradient: o, and a new state."""
    with without_autocast(inputs.v.device):
        chunks = for_heads(inputs, lambda x: x.to(inputs.dtype).transpose(1, 2))
        state = inputs.initial_state
        if state is None:
            state = inputs.v.new_zeros(inputs.state_shape, dtype=inputs.dtype)
        o, state = read(chunks, state)
        return RecurrentOutput(o.transpose(1, 2).to(inputs.v.dtype).contiguous(), state)
