"""Mesa layer (von Oswald et al. 2023, arXiv 2309.05858; MesaNet 2025, arXiv 2506.05233).

    H_t = gamma_t H_{t-1} + beta_t k_t k_t^T,   G_t = gamma_t G_{t-1} + beta_t v_t k_t^T
    o_t = G_t (H_t + Lambda)^{-1} q_t

Lambda (diagonal, > 0, one per key channel) is added at every read and does NOT decay. It is the
argmin of sum_i (decayed beta_i) |S k_i - v_i|^2 + |S Lambda^{1/2}|^2. Seed 000 prints minus for
plus in the sum, |S - S_{t-1}|^2 for |S|^2, and P_t k_t (S k - v)^T for (S k - v) k_t^T P_t.
"""

import torch


def recurrence(q, k, v, gamma, beta, ridge, state=None):
    """q, k: (T, K); v: (T, V); gamma, beta: (T,); ridge: (K,); state: H (K, K), G (V, K)."""
    H = q.new_zeros(k.shape[1], k.shape[1]) if state is None else state[0]
    G = q.new_zeros(v.shape[1], k.shape[1]) if state is None else state[1]
    outputs = []
    for t in range(len(q)):
        H = gamma[t] * H + beta[t] * torch.outer(k[t], k[t])
        G = gamma[t] * G + beta[t] * torch.outer(v[t], k[t])
        outputs.append(G @ torch.linalg.solve(H + torch.diag(ridge), q[t]))
    return torch.stack(outputs), (H, G)
