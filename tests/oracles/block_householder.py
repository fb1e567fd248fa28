"""DeltaNet with block-diagonal generalised Householder matrices (seed 001, section 5.3).

    M_t = blockdiag_g (I - beta_{t,g} k_{t,g} k_{t,g}^T),   S_t = S_{t-1} M_t + v_t (beta_t k_t)^T

The key is cut into G blocks of K/G channels and each block erases on its own, so state memory
grows with K while a kernel works on one block at a time. It is future work in the text, which
fixes neither the number of betas nor the norm; here beta is per block (equal betas: the scalar
form) and each block of k has whatever norm it is given (unit norm per block keeps every
eigenvalue in [-1, 1] for beta in [0, 2]).
Equal to G DeltaNets with the same values and their outputs summed.
"""

import torch


def recurrence(q, k, v, beta, state=None):
    """q, k: (T, K); v: (T, V); beta: (T, G), G divides K; state: (V, K)."""
    S = v.new_zeros(v.shape[1], k.shape[1]) if state is None else state
    size = k.shape[1] // beta.shape[1]
    outputs = []
    for t in range(len(q)):
        blocks = [
            torch.eye(size, dtype=k.dtype) - b * torch.outer(x, x)
            for b, x in zip(beta[t], k[t].split(size), strict=True)
        ]
        write = beta[t].repeat_interleave(size) * k[t]
        S = S @ torch.block_diag(*blocks) + torch.outer(v[t], write)
        outputs.append(S @ q[t])
    return torch.stack(outputs), S
