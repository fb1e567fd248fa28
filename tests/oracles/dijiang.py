"""DiJiang (Chen et al. 2024, arXiv 2403.19928, weighted DCT features; released Pythia models).

    phi(x) = D exp(T C x)      C: orthonormal DCT-II matrix, T = Diag(t), t = normal quantiles of
                               uniforms, D a learned weight
    o_t = sum_{j<=t} phi(q_t) . phi(k_j) v_j / sum_{j<=t} phi(q_t) . phi(k_j)

The released models compute softmax_channels(x C T), that is T C^T x with C TRANSPOSED and softmax
in the place of D exp; they divide by no sum of scores, but weigh q_t phi by g^t and k_j phi by
g^-j (RetNet's decay, g_h = 1 - exp(linspace(log 1/32, log 1/512, H))).
"""

import math

import torch


def dct(dim):
    """Row j: s_j cos(pi (2 n + 1) j / (2 d)), s_0 = sqrt(1/d), else sqrt(2/d)."""
    j, n = torch.arange(dim, dtype=torch.float64)[:, None], torch.arange(dim, dtype=torch.float64)
    C = torch.cos(math.pi * (2 * n + 1) * j / (2 * dim)) * math.sqrt(2 / dim)
    C[0] = math.sqrt(1 / dim)
    return C


def features(x, t, weight):
    """As printed. x: (..., D); t, weight: (D,)."""
    return weight * torch.exp(t * (x @ dct(x.shape[-1]).T))


def recurrence(phi_q, phi_k, v):
    """Normalised linear attention, as printed."""
    S, z = v.new_zeros(v.shape[1], phi_k.shape[1]), torch.zeros_like(phi_k[0])
    outputs = []
    for t in range(len(v)):
        S, z = S + torch.outer(v[t], phi_k[t]), z + phi_k[t]
        outputs.append(S @ phi_q[t] / (z @ phi_q[t]))
    return torch.stack(outputs), S
