"""LRU (Orvieto et al. 2023, arXiv 2303.06349, section 3; minimal-LRU).

    lambda = exp(-exp(nu) + i exp(theta)),  gamma = exp(gamma_log), started at sqrt(1 - |lambda|^2)
    h_t = lambda h_{t-1} + gamma * (B u_t),    y_t = Re(C h_t) + D * u_t

The input of token t enters h_t at once. There is no factor 2 on the real part (S4D has one). gamma
is a free parameter after its start.
"""

import torch


def eigenvalues(nu, theta):
    return torch.polar(torch.exp(-torch.exp(nu)), torch.exp(theta))


def first_gamma(nu):
    return torch.sqrt(1 - torch.exp(-2 * torch.exp(nu)))


def recurrence(u, nu, theta, gamma, B, C, D):
    """u: (T, M); nu, theta, gamma: (N,); B: (N, M), C: (M, N) complex; D: (M,)."""
    eigen = eigenvalues(nu, theta)
    h = torch.zeros_like(eigen)
    outputs = []
    for t in range(len(u)):
        h = eigen * h + gamma * (B @ u[t].to(B.dtype))
        outputs.append((C @ h).real + D * u[t])
    return torch.stack(outputs), h
