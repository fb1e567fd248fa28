"""The variants of seed 003 ("Multi-Head DeltaNet", 2025): H heads with n slots each.

| variant     | queries | keys | values | states | etas |
| multi-head  | n       | n    | n      | n      | n    |
| multi-KV    | 1       | n    | n      | n      | n    |
| multi-value | 1       | 1    | n      | n      | 1    |
| multi-key   | 1       | n    | 1      | n      | n    |
| multi-query | n       | 1    | 1      | 1      | 1    |

Each slot is a DeltaNet: W_t = (I - eta k^T k) W_{t-1} + eta k^T v (row vectors), y = q W. The blog
sums the slots' outputs; with that sum, multi-value with a shared eta is ONE DeltaNet with
v = sum v_i and multi-query ONE with q = sum q_i, so slots are returned unsummed here: concatenate
(and project), or sum, outside. The print: "q_t W_{t,i}" in the multi-head read-out is q_{t,i}
W_{t,i} (the table gives it n queries); DeltaProduct's A_t is the product in DECREASING order and
its B_t = sum_i [prod_{j=n}^{i+1} (I - eta_j k_j^T k_j)] eta_i k_i^T v_i; the gradient lacks its d.
"""

import torch


def recurrence(q, k, v, eta):
    """One head. q: (T, nq, K), k: (T, nk, K), v: (T, nv, V), eta: (T, ne); each n is 1 or slots.

    Slots with their own k, v or eta have their own state; queries alone share one. Returns
    y: (T, slots, V) and W: (states, K, V).
    """
    states = max(k.shape[1], v.shape[1], eta.shape[1])
    slots = max(states, q.shape[1])
    W = [v.new_zeros(k.shape[2], v.shape[2]) for _ in range(states)]

    def pick(x, t, i):
        return x[t, i if x.shape[1] > 1 else 0]

    outputs = []
    for t in range(len(q)):
        for i in range(states):
            key, rate = pick(k, t, i), pick(eta, t, i)
            W[i] = W[i] - rate * torch.outer(key, key @ W[i] - pick(v, t, i))
        row = [pick(q, t, i) @ W[i if states > 1 else 0] for i in range(slots)]
        outputs.append(torch.stack(row))
    return torch.stack(outputs), torch.stack(W)
