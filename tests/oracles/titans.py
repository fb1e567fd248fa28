"""Titans' neural long-term memory (Behrouz et al. 2025, arXiv 2501.00663, eqs. 11-18).

    loss(M; k, v) = |M(k) - v|^2                      (12)  no 1/2: the gradient carries a 2
    S_t = eta_t S_{t-1} - theta_t grad loss(M_{t'})   (14)
    M_t = (1 - alpha_t) M_{t-1} + S_t                 (13)
    y_t = M_t(q_t)                                    (15)  reads AFTER the write

t' is the last token before t's mini-batch of b tokens: all gradients of a mini-batch are taken at
the memory it started from, while S and M still move, decay and are read token by token.
In the print: eq. 16 says t' = t - mod(t, b) with t from 1, which for t = b is b itself; the text
("the first chunk, t = b and so t' = 0") needs t' = (t - 1) - mod(t - 1, b). Its
beta_i = prod_{i=1}^{i} (1 - alpha_i) reuses i. Eq. 16 leaves the momentum out and eq. 17 the
factor 2 of the loss; eq. 17 also has x in the place of k and v.
Released re-implementations: titans-pytorch averages the loss over channels (divides the gradient
by V), wraps M as x + LN(M(x)), shares alpha and eta over a chunk and reads the memory of the last
COMPLETE chunk; flash-linear-attention trains LN(W k) + k towards v, and its layer-norm gradient
lacks a pair of parentheses.
"""

import torch
from torch.nn.functional import silu


def mlp(weights, x, activation=silu):
    """M(x) = W_n act(... act(W_1 x)): keys "W1", "W2", ... in order."""
    for depth, name in enumerate(sorted(weights)):
        x = weights[name] @ (x if depth == 0 else activation(x))
    return x


def recurrence(memory, weights, q, k, v, theta, eta, alpha, mini_batch=1):
    """q, k: (T, K); v: (T, V); theta (step), eta (momentum), alpha (forgetting): (T,).

    Returns the outputs, M_T and S_T.
    """
    gradient = torch.func.grad(lambda w, k, v: (memory(w, k) - v).square().sum())
    S = {name: torch.zeros_like(w) for name, w in weights.items()}
    M = start = weights
    outputs = []
    for t in range(len(q)):
        if t % mini_batch == 0:
            start = M
        surprise = gradient(start, k[t], v[t])
        S = {name: eta[t] * S[name] - theta[t] * surprise[name] for name in S}
        M = {name: (1 - alpha[t]) * M[name] + S[name] for name in M}
        outputs.append(memory(M, q[t]))
    return torch.stack(outputs), M, S
