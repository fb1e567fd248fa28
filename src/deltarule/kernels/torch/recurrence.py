"""The stages composed: every decay and every erase, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.torch.chunk_output import (
    Queries,
    chunk_output,
    chunk_output_backward,
    queries,
    queries_backward,
)
from deltarule.kernels.torch.chunks import Slab, join
from deltarule.kernels.torch.corrected_values import (
    Corrected,
    free,
    free_backward,
    tied,
    tied_backward,
)
from deltarule.kernels.torch.decay import (
    Decay,
    add,
    add_between,
    decay_backward,
    make_decay,
    scale,
    scale_backward,
)
from deltarule.kernels.torch.layout import (
    Chunks,
    chunk_states_shape,
    cut_inputs,
    cut_output,
    empty_gradients,
    join_gradients,
    plan,
)
from deltarule.kernels.torch.next_state import Write, next_state, next_state_backward


class Work(NamedTuple):
    """What forward and backward share of a slab; no part of it depends on the state."""

    decay: Decay
    corrected: Corrected | None
    keys: list[Tensor]  # y of each write
    writes: list[Write]
    queries: Queries


def forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states at the starts of the chunks (none without `save`)."""
    heads = inputs.q.shape[2]
    o = inputs.v.new_empty(inputs.output_shape)
    final_state = _initial_state(inputs).clone(memory_format=torch.contiguous_format)
    shape = chunk_states_shape(inputs) if save else (0, *inputs.state_shape[1:])
    saved = final_state.new_zeros(shape)
    with torch.autocast(o.device.type, enabled=False):
        size, groups = plan(inputs)
        for sequences, slabs in groups:
            state = final_state[sequences].unflatten(1, (heads, -1))
            for slab in slabs:
                work = _work(cut_inputs(inputs, slab, size))
                states, values = next_state(work.writes, work.decay.whole, state, slab.bounds)
                part = chunk_output(work.queries, states, values)
                join(part.flatten(1, 2), o, slab, size, 1)
                if save:
                    saved.index_copy_(0, slab.chunks, states.flatten(1, 2))
            final_state[sequences] = state.flatten(1, 2)
    return o, final_state, saved


def backward(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients by q, k, v, beta, a, b, log_decay and initial_state; None for what is None.

    Without saved states the forward runs once more, to have them.
    """
    if saved.numel() == 0:
        saved = forward(inputs, save=True)[2]
    heads = inputs.q.shape[2]
    gradients = empty_gradients(inputs)
    d_initial = d_final.clone(memory_format=torch.contiguous_format)
    with torch.autocast(d_o.device.type, enabled=False):
        size, groups = plan(inputs)
        for sequences, slabs in groups:
            d_state = d_initial[sequences].unflatten(1, (heads, -1))
            for slab in reversed(slabs):
                states = saved.index_select(0, slab.chunks).unflatten(1, (heads, -1))
                chunks = cut_inputs(inputs, slab, size)
                d_part = cut_output(d_o, inputs, slab, size)
                d_chunks = _slab_backward(d_part, d_state, chunks, states, slab)
                join_gradients(d_chunks, inputs, gradients, slab, size)
            d_initial[sequences] = d_state.flatten(1, 2)
    return *gradients, None if inputs.initial_state is None else d_initial


def _work(chunks: Chunks) -> Work:
    _, k, v, beta, a, b, log_decay = chunks
    decay = make_decay(log_decay, free_erase=a is not None)
    if beta is not None:
        corrected, keys = tied(k, v, beta, decay), [k]
    elif a is not None and b is not None:
        corrected, keys = free(a, b, k, v, decay), [b, k]
    else:
        corrected, keys = None, [k]
    if corrected is None:
        writes = [Write(v, None, scale(k, decay.end))]
    else:
        writes = [Write(corrected.x0, corrected.from_state, scale(keys[0], decay.end))]
        writes += [Write(v, None, scale(y, decay.end)) for y in keys[1:]]
    return Work(decay, corrected, keys, writes, queries(chunks.q, keys, decay))


def _slab_backward(
    d_o: Tensor, d_state: Tensor, chunks: Chunks, states: Tensor, slab: Slab
) -> Chunks:
    """Gradients by the chunks; d_state goes from the end of the slab to its start."""
    work = _work(chunks)
    values = [
        x0 if from_state is None else x0.add_(from_state @ states.mT)
        for x0, from_state, _ in work.writes
    ]
    d_values, d_read = chunk_output_backward(work.queries, d_o)
    d_ends = next_state_backward(
        d_values, d_read, work.writes, work.decay.whole, d_state, slab.bounds
    )
    dq, d_keys, d_decay = queries_backward(
        d_o, states, values, work.queries, chunks.q, work.keys, work.decay
    )
    d_end, d_whole = None, None
    for i, (x, y, write) in enumerate(zip(values, work.keys, work.writes, strict=True)):
        dy, d_exponent = scale_backward(x @ d_ends, write.y, y, work.decay.end)
        d_keys[i], d_end = d_keys[i] + dy, add(d_end, d_exponent)
    if work.decay.whole is not None:
        d_whole = ((states * d_ends).sum(-2, keepdim=True) * work.decay.whole).sum_to_size(
            work.decay.whole.shape
        )
    d_decay = d_decay._replace(end=d_end, whole=d_whole)
    return _erase_backward(dq, d_keys, d_values, d_decay, values, states, work, chunks)


def _erase_backward(
    dq: Tensor,
    d_keys: list[Tensor],
    d_values: list[Tensor],
    d_decay: Decay,
    values: list[Tensor],
    states: Tensor,
    work: Work,
    chunks: Chunks,
) -> Chunks:
    """Add what comes through the corrected values to the gradients by everything else."""
    _, k, v, beta, a, b, _ = chunks
    dk, dv, d_beta, da, db = d_keys[-1], d_values[-1], None, None, None
    if work.corrected is not None:
        seen = d_values[0], values[0], states, work.corrected
        if beta is not None:
            dk_erase, dv, d_beta, d_erase = tied_backward(*seen, k, v, beta, work.decay)
            dk = dk + dk_erase
        elif a is not None and b is not None:
            da, db, dk_erase, dv_erase, d_erase = free_backward(*seen, a, b, k, v, work.decay)
            dk, dv, db = dk + dk_erase, dv + dv_erase, db + d_keys[0]
        d_decay = Decay(
            start=add(d_decay.start, d_erase.start),
            end=d_decay.end,
            whole=d_decay.whole,
            between=add_between(d_decay.between, d_erase.between),
            start_before=d_erase.start_before,
            between_before=d_erase.between_before,
        )
    d_log_decay = decay_backward(d_decay, dq.shape[-2])
    return Chunks(dq, dk, dv, d_beta, da, db, d_log_decay)


def _initial_state(inputs: Inputs) -> Tensor:
    if inputs.initial_state is not None:
        return inputs.initial_state
    return torch.zeros(inputs.state_shape, dtype=inputs.dtype, device=inputs.q.device)
