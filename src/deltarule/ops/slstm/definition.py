"""The definition of `slstm`: token by token, four gates from the input and the last output.

i, f, z, o = gates_t + R h_{t-1}        m_t = max(log sigmoid(f) + m_{t-1}, i)
c_t = f' c_{t-1} + i' tanh(z)   n_t = f' n_{t-1} + i'   f' = e^{log sigmoid(f) + m_{t-1} - m_t}
h_t = sigmoid(o) c_t / n_t      i' = e^{i - m_t}        n = 0: no token yet, and m_t = i

Plain differentiable PyTorch; in float64 it is the oracle of the tests.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.sequences import computed, sequences_of, stack_rows
from deltarule.shapes import RecurrentOutput


def slstm(inputs: Any) -> RecurrentOutput:
    gates, recurrent, before, lengths, cu_seqlens = inputs
    outputs: list[list[Tensor]] = [[] for _ in range(len(gates))]
    states = []
    for n, (row, first, last) in enumerate(sequences_of(gates, cu_seqlens, lengths)):
        state = before[n]
        for t in range(first, last):
            state = step(computed(gates[row, t]), computed(recurrent, gates), state)
            outputs[row].append(state[:, 0].to(gates.dtype))
        states.append(state)
    o = stack_rows(outputs, gates[:, :, :, 0])
    return RecurrentOutput(o, torch.stack(states) if states else before.clone())


def step(gates: Tensor, recurrent: Tensor, state: Tensor) -> Tensor:
    """One token of one sequence: gates [H, 4, D], R [H, 4, D, D] and h, c, n, m [H, 4, D]."""
    h, c, n, m = state.unbind(1)
    i, f, z, o = (gates + torch.einsum("hxde, he -> hxd", recurrent, h)).unbind(1)
    kept = F.logsigmoid(f) + m.detach().masked_fill(n == 0, -torch.inf)
    # It cancels in c / n, and so does its gradient.
    m = torch.maximum(kept, i).detach()
    forget, write = torch.exp(kept - m), torch.exp(i - m)
    c, n = forget * c + write * torch.tanh(z), forget * n + write
    return torch.stack([torch.sigmoid(o) * c / n, c, n, m], dim=1)
