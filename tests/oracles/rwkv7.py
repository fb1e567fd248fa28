"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456, section 4; released rwkv_v7_numpy.py).

    S_t = S_{t-1} (Diag(w_t) - kappa_t (a_t * kappa_t)^T) + v_t k~_t^T,   o_t = S_t r_t
    kappa = (k * k_k) / |k * k_k|,   k~ = k * (1 + (a - 1) k_a)
    w = exp(-e^{-1/2} sigmoid(.)),   a = sigmoid(.) in (0, 1)
    bonus after the group norm:  (sum r_t * k~_t * r_k) v_t

The erase term reads the UNDECAYED S_{t-1}: S w - (S kappa)(a kappa)^T. Seed 002 prints
S (diag - a b^T), seeds 000 and 004 S (diag + a b^T): the kernels' a is -kappa, b is a * kappa.
"""

import math

import torch


def decay(logit):
    return torch.exp(-math.exp(-0.5) * torch.sigmoid(logit))


def keys(k, k_k, k_a, a):
    """kappa and k~; k, a: (T, K); k_k, k_a: (K,)."""
    kappa = k * k_k
    kappa = kappa / kappa.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return kappa, k * (1 + (a - 1) * k_a)


def recurrence(r, w, k, v, kappa, a):
    """r, w, k (that is k~), kappa, a: (T, K); v: (T, V)."""
    S = v.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(r)):
        erased = torch.outer(S @ kappa[t], a[t] * kappa[t])
        S = S * w[t] - erased + torch.outer(v[t], k[t])
        outputs.append(S @ r[t])
    return torch.stack(outputs), S


def bonus(r, k, v, r_k):
    return (r * k * r_k).sum(-1, keepdim=True) * v
