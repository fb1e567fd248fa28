"""DeltaNet by the parallel scan of seed 001's footnote 1 and section 5.1.

    S_t = S_{t-1} M_t + X_t,  M_t = I - beta_t k_t k_t^T,  X_t = beta_t v_t k_t^T
    (M, X) then (M', X') = (M M', X M' + X')              associative, not commutative

An inclusive scan by doubling: after step s each position holds the composition of its last 2^s.
"""

import torch


def scan(q, k, v, beta):
    identity = torch.eye(k.shape[1], dtype=k.dtype)
    M = identity - beta[:, None, None] * k[:, :, None] * k[:, None, :]
    X = beta[:, None, None] * v[:, :, None] * k[:, None, :]
    distance = 1
    while distance < len(q):
        earlier_M, earlier_X = M[:-distance], X[:-distance]
        X = torch.cat([X[:distance], earlier_X @ M[distance:] + X[distance:]])
        M = torch.cat([M[:distance], earlier_M @ M[distance:]])
        distance *= 2
    return (X @ q[:, :, None])[..., 0], X[-1]
