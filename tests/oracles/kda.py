"""Kimi delta attention (Kimi Team 2025, arXiv 2510.26692, eq. 1) and its two gates.

    S_t = S_{t-1} Diag(a_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = S_t q_t

Decay first: the erase term reads S Diag(a) (Gated DeltaNet with a vector gate; unlike RWKV-7 and
Comba). log a = -exp(A_log) softplus(x + bias), or, bounded from below by L in [-5, 0):
log a = L sigmoid(exp(A_log) (x + bias)); A_log is per head, bias per channel. The released kernels
scale q by K^-1/2 and normalise q and k.
"""

import torch


def bounded_log_decay(x, A_log=0.0, bias=0.0, bound=-5.0):
    return bound * torch.sigmoid(torch.exp(torch.as_tensor(A_log, dtype=x.dtype)) * (x + bias))


def recurrence(q, k, v, log_a, beta):
    """q, k, log_a: (T, K); v: (T, V); beta: (T,)."""
    S = v.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        S = S * torch.exp(log_a[t])
        S = S + beta[t] * torch.outer(v[t] - S @ k[t], k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs), S
