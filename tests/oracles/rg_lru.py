"""RG-LRU (De et al. 2024, Griffin, arXiv 2402.19427, eqs. 1-4; released recurrentgemma).

    r_t = sigmoid(W_a x + b_a),  i_t = sigmoid(W_x x + b_x)    W block-diagonal, a block a head
    a_t = a^(c r_t),  a = sigmoid(Lambda),  c = 8
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)

The released parameter is -Lambda: log a_t = -8 r_t softplus(parameter), as
log sigmoid(Lambda) = -softplus(-Lambda). At the first token of a document the release replaces
sqrt(1 - a_t^2) by 1 and forgets the state; the print does not.
"""

import torch
from torch.nn.functional import softplus


def recurrence(x, recurrence_gate, input_gate, parameter, starts=None):
    """x and both gates' pre-activations: (T, D); parameter: (D,), the released sign.

    starts: (T,) bool, True at the first token of a document; None, as printed: no such token.
    """
    h = torch.zeros_like(x[0])
    outputs = []
    for t in range(len(x)):
        log_a = -8.0 * torch.sigmoid(recurrence_gate[t]) * softplus(parameter)
        a, amplitude = torch.exp(log_a), torch.sqrt(1 - torch.exp(2 * log_a))
        if starts is not None and bool(starts[t]):
            a, amplitude = torch.zeros_like(a), torch.ones_like(a)
        h = a * h + amplitude * torch.sigmoid(input_gate[t]) * x[t]
        outputs.append(h)
    return torch.stack(outputs), h


def block_diagonal(x, weight, bias):
    """x: (T, D); weight: (H, D/H, D/H), rows are inputs; bias: (H, D/H)."""
    blocks = x.reshape(len(x), len(weight), -1)
    return torch.stack([blocks[:, h] @ weight[h] + bias[h] for h in range(len(weight))], 1).reshape(
        x.shape
    )
