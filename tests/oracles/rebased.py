"""ReBased (Aksenov et al. 2024, arXiv 2402.10644, section 4; released mixers/rebased.py).

    x' = gamma * norm(x) + beta,  norm = layer norm without its own weights
    similarity of q, k: (q'^T k')^2 / D        phi(x) = x' (x) x' / sqrt D, D^2 features
    o_t = sum_{j<=t} (q'_t . k'_j)^2 / D v_j / (sum_{j<=t} (q'_t . k'_j)^2 / D + eps)

Where phi(x) is written (gamma norm(x) + beta)^2, the code squares the dot product (all products of
two channels), not each channel. The released mixer normalises over ALL heads together
(H D channels) before it splits heads, flash-linear-attention per head. q and k have weights each
in the release and share them in flash-linear-attention. eps: 1e-12 (release), 1e-5 and 1e-6 there.
"""

import torch
from torch.nn.functional import layer_norm


def transform(x, gamma, beta, eps=1e-5):
    return layer_norm(x, x.shape[-1:], gamma, beta, eps)


def features(x):
    """(..., D) -> (..., D^2): phi(q) . phi(k) = (q . k)^2 / D."""
    return (x[..., :, None] * x[..., None, :]).flatten(-2) * x.shape[-1] ** -0.5


def recurrence(q, k, v, eps=1e-6):
    """q, k: (T, D) after `transform`; v: (T, V)."""
    S = v.new_zeros(v.shape[1], k.shape[1] ** 2)
    z = v.new_zeros(k.shape[1] ** 2)
    outputs = []
    for t in range(len(q)):
        phi = features(k[t])
        S, z = S + torch.outer(v[t], phi), z + phi
        outputs.append(S @ features(q[t]) / (z @ features(q[t]) + eps))
    return torch.stack(outputs), S
