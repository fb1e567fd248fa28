"""The definition of `long_convolution`: every token sums over those before it, one by one.

o_t = sum_{j=0..L-1} taps_j (q_t . k_{t-j}) v_{t-j}        without q and k: their product is 1

Plain differentiable PyTorch; in float64 it is the oracle of the tests.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.sequences import computed, sequences_of, stack_rows
from deltarule.shapes import RecurrentOutput


def long_convolution(call: Any) -> RecurrentOutput:
    """Keep the last L - 1 keys and values of each sequence: a batch row, or a slice of one."""
    v, taps, q, k, initial_state, lengths, cu_seqlens = call
    written = computed(v if k is None else torch.cat([k, v], dim=-1))
    spans = sequences_of(v, cu_seqlens, lengths)
    outputs: list[list[Tensor]] = [[] for _ in range(len(v))]
    states, size = [], (taps.shape[1] - 1, *written.shape[2:])
    for n, (row, first, last) in enumerate(spans):
        earlier = written.new_zeros(size)
        past = list(earlier if initial_state is None else initial_state[n].to(written.dtype))
        for t in range(first, last):
            past.append(written[row, t])
            query = None if q is None else computed(q[row, t])
            outputs[row].append(read(past, computed(taps, v), query).to(v.dtype))
            past.pop(0)
        states.append(torch.stack(past) if past else earlier)
    state = torch.stack(states) if states else written.new_zeros(0, *size)
    return RecurrentOutput(stack_rows(outputs, v), state)


def read(past: list[Tensor], taps: Tensor, query: Tensor | None) -> Tensor:
    """The sum over the last L rows [H, K + V], the newest last."""
    rows, weight = torch.stack(past).flip(0), taps.T
    if query is not None:
        keys, rows = rows.split([query.shape[1], rows.shape[2] - query.shape[1]], dim=2)
        weight = weight * (query * keys).sum(-1)
    return (weight.unsqueeze(-1) * rows).sum(0)
