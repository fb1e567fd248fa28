"""The definition: a state, decayed and erased from the right, written by an outer product, read.

    S_t = S_{t-1} A_t + w_t k_t^T        o_t = scale * S_t q_t        S in R^{V x K}

This function is plain differentiable PyTorch in the dtype of the inputs (float32 at least). The
tests compare every faster form of the operators with it, in float64.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.sequences import computed, per_value_head
from deltarule.shapes import (
    Beta,
    Decay,
    Erase,
    Keys,
    Offsets,
    Queries,
    RecurrentOutput,
    State,
    Values,
)

UNIT_NORM_EPSILON = 1e-6


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta | None = None,
    a: Erase | None = None,
    b: Erase | None = None,
    log_decay: Decay | None = None,
    n_steps: int = 1,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    cu_seqlens: Offsets | None = None,
) -> RecurrentOutput:
    """Decay once a token; then, for each of its steps, erase along the key and write.

    S <- S Diag(exp(log_decay_t))
    S <- S + beta_{t,j} (v_{t,j} - S k_{t,j}) k_{t,j}^T        j = 1..n_steps
    o_t = scale * S q_t

    Without `beta` nothing is erased under a key: S <- S + v_{t,j} k_{t,j}^T. With `a` and `b` a
    rank-one matrix beside the decay sees the undecayed state:
    S <- S (Diag(exp(log_decay_t)) + a_t b_t^T)
    """
    if normalize_qk:
        q, k = unit_norm(q), unit_norm(k)
    (batch, tokens, _, key_size), (heads, value_size) = q.shape, v.shape[2:]
    queries = per_value_head(q, heads) * (key_size**-0.5 if scale is None else scale)
    keys, values = per_value_head(k, heads), computed(v)
    strength = None if beta is None else computed(beta, v).unsqueeze(-1)
    erase = None if a is None or b is None else (computed(a, v), computed(b, v))
    decay = _decay(log_decay, queries)
    # Each sequence is a batch row, or a slice of the one packed row.
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = batch if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        initial_state = queries.new_zeros(sequences, heads, value_size, key_size)
    initial_state = initial_state.to(queries.dtype)

    outputs, final_states = [], []
    for i, (start, end) in enumerate(pairwise(bounds)):
        state = initial_state if cu_seqlens is None else initial_state[i : i + 1]
        for t in range(start, end):
            before, state = state, state * decay[:, t]
            if erase is not None:
                state = state + _outer(_read(before, erase[0][:, t]), erase[1][:, t])
            for row in range(t * n_steps, (t + 1) * n_steps):
                write = values[:, row]
                if strength is not None:
                    write = strength[:, row] * (write - _read(state, keys[:, row]))
                state = state + _outer(write, keys[:, row])
            outputs.append(_read(state, queries[:, t]))
        final_states.append(state)
    o = torch.stack(outputs, dim=1) if outputs else v.clone()
    final_state = torch.cat(final_states) if final_states else initial_state
    return RecurrentOutput(o.to(v.dtype), final_state.clone())


def unit_norm(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6) over the last axis."""
    x = computed(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_NORM_EPSILON)


def _decay(log_decay: Tensor | None, queries: Tensor) -> Tensor:
    """exp(log_decay) as [B, T, HV, 1, 1 or K], which multiplies a state from the right."""
    batch, tokens, heads, _ = queries.shape
    if log_decay is None:
        return queries.new_ones(batch, tokens, heads, 1, 1)
    if log_decay.ndim == 1:
        log_decay = log_decay.expand(batch, tokens, heads)
    if log_decay.ndim == 3:
        log_decay = log_decay.unsqueeze(-1)
    return log_decay.to(queries.dtype).exp().unsqueeze(-2)


def _read(state: Tensor, query: Tensor) -> Tensor:
    """S q for every row and head: [B, HV, V, K], [B, HV, K] -> [B, HV, V]."""
    return (state @ query.unsqueeze(-1)).squeeze(-1)


def _outer(value: Tensor, key: Tensor) -> Tensor:
    """v k^T for every row and head: [B, HV, V], [B, HV, K] -> [B, HV, V, K]."""
    return value.unsqueeze(-1) * key.unsqueeze(-2)


# Steps on a pool of states, a token of a row at a time, by the function above: `Run`.
#
# Their inputs and calls are those of the modules beside this file, with checks that are not its.
Inputs = Any
Run = Callable[[Inputs], RecurrentOutput]


def stretch(inputs: Inputs, first: int, last: int, state: Tensor) -> Inputs:
    """Tokens first to last of rows that lie end to end, begun from state [HV, V, K]."""
    found = inputs.each(lambda x, n: x.flatten(0, 1)[first * n : last * n].unsqueeze(0))
    start = state.to(inputs.dtype).unsqueeze(0)
    return found._replace(cu_seqlens=None, initial_state=start)


def taken(state: Tensor, slot: int, null_index: int) -> Tensor:
    """The state of a slot; zeros of none."""
    return state[slot].clone() if slot > null_index else torch.zeros_like(state[0])


def step(run: Run, inputs: Inputs, call: Any, offsets: Tensor) -> Tensor:
    """Outputs, zeros in rows that start from no slot; the pool is written, and `call.states`."""
    state, slots, null_index = call.state, call.slots.tolist(), call.null_index
    accepted = [1] * len(slots) if call.accepted is None else call.accepted.tolist()
    o = inputs.v.new_zeros(inputs.output_shape)
    for row, (first, last) in enumerate(pairwise(offsets.tolist())):
        own = slots[row]
        start = own[accepted[row] - 1] if isinstance(own, list) else own
        if start <= null_index or first == last:
            continue
        current = taken(state, start, null_index).to(inputs.dtype)
        for t in range(first, last):
            part = run(stretch(inputs, t, t + 1, current))
            assert part.final_state is not None
            o.view(-1, *o.shape[2:])[t] = part.o[0, 0]
            current = part.final_state[0]
            if call.states is not None:
                call.states[row, t - first] = current.to(state.dtype)
            if isinstance(own, list) and own[t - first] > null_index:
                state[own[t - first]] = current.to(state.dtype)
        if not isinstance(own, list):
            state[own] = current.to(state.dtype)
    return o
