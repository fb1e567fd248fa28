"""The definition of `selective_scan`: every entry of the state decays, and is written, on its own.

S <- S * exp(delta_t A + value_log_decay_t 1^T + 1 log_decay_t^T), `signed`: S * (2 exp(..) - 1)
S <- S + v_t k_t^T, or with `beta`  S <- S + Diag(beta_t) (v_t k_t^T - S * (1 k_t^2^T))
o_t = scale * S_t q_t

A product with * is taken entry by entry. Plain differentiable PyTorch, one token at a time; in
float64 it is the oracle of the tests.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.sequences import computed
from deltarule.shapes import RecurrentOutput

# The arguments of a call, whose checks are not of this file.
Inputs = Any


def selective_scan(inputs: Inputs) -> RecurrentOutput:
    """Carry the state along each sequence: a batch row, or a slice of the one packed row."""
    q, k, v, delta, A, value_log_decay, log_decay, beta, initial_state, cu_seqlens, *_ = inputs
    batch, tokens, heads, value_size = v.shape
    # Every factor as [B or 1, T or 1, HV, V or 1, K or 1].
    values, queries, keys = computed(v).unsqueeze(-1), entries(q, v), entries(k, v)
    decay = torch.ones_like(values)
    if delta is not None and A is not None:
        decay = decay * torch.exp(computed(delta, v).unsqueeze(-1) * computed(A, v))
    if value_log_decay is not None:
        decay = decay * computed(value_log_decay, v).unsqueeze(-1).exp()
    if log_decay is not None:
        decay = decay * entries(log_decay, v).exp()
    if inputs.signed:
        decay = 2 * decay - 1
    write = values * keys
    if beta is not None:
        strength = computed(beta, v).unsqueeze(-1)
        decay, write = decay * (1 - strength * keys.square()), strength * write

    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = batch if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        initial_state = values.new_zeros(sequences, heads, value_size, q.shape[-1])
    initial_state = initial_state.to(values.dtype)
    outputs, final_states = [], []
    for i, (start, end) in enumerate(pairwise(bounds)):
        state = initial_state if cu_seqlens is None else initial_state[i : i + 1]
        for t in range(start, end):
            state = state * decay[:, t] + write[:, t]
            outputs.append(inputs.scale * (state * queries[:, t % queries.shape[1]]).sum(-1))
        final_states.append(state)
    o = torch.stack(outputs, dim=1) if outputs else v.clone()
    final_state = torch.cat(final_states) if final_states else initial_state
    return RecurrentOutput(o.to(v.dtype), final_state.clone())


def entries(x: Tensor, v: Tensor) -> Tensor:
    """[B, T, H, K] -> [B, T, HV, 1, K]; what is constant over time [HV, V, K] -> [1, 1, HV, V, K].

    Value head h reads key head h * H // HV.
    """
    x = computed(x, v)
    if x.ndim == 3:
        return x[None, None]
    return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2).unsqueeze(-2)
