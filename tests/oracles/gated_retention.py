"""Gated retention (Sun et al. 2024, YOCO, arXiv 2405.05254, section 3.1, "gRet").

    gamma_t = sigmoid(w_gamma^T x_t)^(1/tau), tau = 16, one number per head
    S_t = gamma_t S_{t-1} + v_t k_t^T,   o_t = S_t q_t

Rotary on q and k, group norm per head and a SiLU gate outside, as in RetNet.
"""

import torch
from torch.nn.functional import logsigmoid


def gate(logit, tau=16.0):
    return torch.exp(logsigmoid(logit) / tau)


def recurrence(q, k, v, gamma):
    """q, k: (T, K); v: (T, V); gamma: (T,)."""
    S = v.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        S = gamma[t] * S + torch.outer(v[t], k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs), S
