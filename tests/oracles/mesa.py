"""Mesa layer (von Oswald et al. 2023, arXiv 2309.05858; MesaNet 2025, arXiv 2506.05233).

    H_t = gamma_t H_{t-1} + beta_t k_t k_t^T,   G_t = gamma_t G_{t-1} + beta_t v_t k_t^T
    o_t = G_t (H_t + Lambda)^{-1} q_t

Lambda (diagonal, > 0, one per key channel) is added at every read and does NOT decay. It is the
argmin of sum_i (decayed beta_i) |S k_i - v_i|^2 + |S Lambda^{1/2}|^2. Seed 000 prints minus for
plus in the sum, |S - S_{t-1}|^2 for |S|^2, and P_t k_t (S k - v)^T for (S k - v) k_t^T P_t.

For gamma = 1 the same is a recursion (Sherman-Morrison), P_0 = Lambda^{-1}:
    P_t = P_{t-1} - beta P_{t-1} k k^T P_{t-1} / (1 + beta k^T P_{t-1} k)
    S_t = S_{t-1} - beta (S_{t-1} k - v) k^T P_t,    o_t = S_t q_t.
With gamma < 1 the recursion, P_{t-1} divided by gamma first, decays Lambda as well: another model.
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


def sherman_morrison(q, k, v, beta, ridge):
    """Recursive least squares."""
    P = torch.diag(1 / ridge)
    S = q.new_zeros(v.shape[1], k.shape[1])
    outputs = []
    for t in range(len(q)):
        Pk = P @ k[t]
        P = P - beta[t] * torch.outer(Pk, Pk) / (1 + beta[t] * k[t] @ Pk)
        S = S - beta[t] * torch.outer(S @ k[t] - v[t], P @ k[t])
        outputs.append(S @ q[t])
    return torch.stack(outputs), (P, S)
