"""Comba (Hu et al. 2025, arXiv 2506.02475, eq. 5).

    S_t = S_{t-1} (alpha_t - beta~_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t (q_t - d k_t).

The erase term reads S_{t-1} BEFORE the decay: alpha multiplies the identity only. Gated DeltaNet
erases after the decay, alpha S (I - beta k k^T); the two differ by the factor alpha on the erased
part. The released kernels agree with eq. 5 (both the recurrent kernel and the chunk, whose
decay ratio is alpha_1 ... alpha_{i-1} / (alpha_1 ... alpha_j)); the file of naive forms beside
them holds a token loop that decays first, which neither kernel computes.
"""

import torch


def recurrence(q, k, v, alpha, beta, beta_tilde, d=0.0):
    """Eq. 5. q, k: (T, K); v: (T, V); alpha, beta, beta_tilde: (T,)."""
    S = v.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        erased = torch.outer(S @ k[t], k[t])
        S = alpha[t] * S - beta_tilde[t] * erased + beta[t] * torch.outer(v[t], k[t])
        outputs.append(S @ (q[t] - d * k[t]))
    return torch.stack(outputs), S


def with_feedback_key(q, k, v, p, alpha, beta):
    """As the released kernels take it: S_t = alpha_t S_{t-1} + beta_t (v_t - S_{t-1} p_t) k_t^T.

    With p = b k it is eq. 5 for beta~ = b beta; q is already corrected.
    """
    S = v.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        S = alpha[t] * S + beta[t] * torch.outer(v[t] - S @ p[t], k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs), S


def released_inputs(q, k, b_logit, d, eps=1e-6):
    """The q, k, p of the released layer: correct q with the unnormalised p, then normalise all.

    p = sigmoid(b) k is normalised too, so b leaves p = k / |k| (up to eps): in the released
    layer beta~ = beta. b acts only through q - d p. The print has beta~ = b beta.
    """
    p = torch.sigmoid(torch.as_tensor(b_logit, dtype=k.dtype)) * k

    def normalise(x):
        return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)

    return normalise(q - d * p), normalise(k), normalise(p)
