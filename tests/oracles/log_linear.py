"""Log-linear attention (Guo et al. 2025, arXiv 2506.04761, section 3); the seeds do not name it.

    o_t = sum_levels lambda_t^(l) S_t^(l) q_t,   S_t^(l) = sum over the tokens of level l of
          (decay from j to t) v_j k_j^T

Fenwick partition of 0 .. t (t from 0): level 0 is t itself; then, for each set bit b of t from the
lowest, level b + 1 holds the 2^b tokens before those already taken. lambda belongs to the READING
token. With every lambda = 1: linear attention with decay.
"""

import torch


def level(t, j):
    """The level at which token t sees token j <= t."""
    if j == t:
        return 0
    end, bit = t, 0
    while True:
        if end >> bit & 1:
            start = end - (1 << bit)
            if j >= start:
                return bit + 1
            end = start
        bit += 1


def recurrence(q, k, v, log_decay, scales):
    """q, k: (T, K); v: (T, V); log_decay: (T,); scales: (T, levels). Returns the level states."""
    levels = [v.new_zeros(v.shape[1], k.shape[1]) for _ in range(scales.shape[1])]
    outputs = []
    for t in range(len(q)):
        # The states of all the levels below the lowest set bit of t, and level 0, merge there.
        if t > 0:
            lowest = (t & -t).bit_length()
            merged = sum(levels[1:lowest], levels[0])
            levels = [torch.zeros_like(S) if i < lowest else S for i, S in enumerate(levels)]
            levels[lowest] = merged
        levels = [torch.exp(log_decay[t]) * S for S in levels]
        levels[0] = torch.outer(v[t], k[t])
        outputs.append(
            sum(
                (s * S for s, S in zip(scales[t], levels, strict=True)), torch.zeros_like(levels[0])
            )
            @ q[t]
        )
    return torch.stack(outputs), levels


def by_definition(q, k, v, log_decay, scales):
    total = log_decay.cumsum(0)
    outputs = []
    for t in range(len(q)):
        o = torch.zeros_like(v[0])
        for j in range(t + 1):
            weight = scales[t, level(t, j)] * torch.exp(total[t] - total[j])
            o = o + weight * (q[t] @ k[j]) * v[j]
        outputs.append(o)
    return torch.stack(outputs)
