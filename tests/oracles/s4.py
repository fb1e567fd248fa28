"""S4 with a diagonal complex state: S4D (Gu et al. 2022, arXiv 2206.11893) and HiPPO-LegS.

    x'(t) = A x(t) + B u(t),  y(t) = 2 Re(C x(t)) + D u(t);  A, B, C: N/2 complex, per channel
    zero-order hold:  dA = exp(dt A),  dB = B (exp(dt A) - 1) / A
    x_t = dA x_{t-1} + dB u_t

Starts (real part -1/2; n = 0 .. N/2 - 1): S4D-Lin, imaginary part pi n (eq. 9); S4D-Inv,
N/pi (N / (2 n + 1) - 1) with the FULL N (eq. 8); S4D-LegS, the eigenvalues of HiPPO-LegS plus its
rank-one part (the normal part). Only one of each conjugate pair is kept: hence the 2. The released
code writes every imaginary part with the other sign, which is the conjugate and changes nothing
but the sign of C's; it also skips the 1/2 on LegS's B. Seed 001's Table 4 shows a real S with
S exp(-alpha 1^T exp(A)) and drops B's (exp(dt A) - 1) / A.
"""

import math

import torch


def lin(states):
    n = torch.arange(states // 2, dtype=torch.float64)
    return torch.complex(torch.full_like(n, -0.5), math.pi * n)


def inv(states):
    n = torch.arange(states // 2, dtype=torch.float64)
    return torch.complex(torch.full_like(n, -0.5), states / math.pi * (states / (2 * n + 1) - 1))


def hippo_legs(states):
    """A_nk = -sqrt((2n+1)(2k+1)) below the diagonal, -(n+1) on it; B_n = sqrt(2n+1)."""
    n = torch.arange(states, dtype=torch.float64)
    root = torch.sqrt(2 * n + 1)
    A = -torch.tril(torch.outer(root, root), -1) - torch.diag(n + 1)
    return A, root


def legs(states):
    """Eigenvalues of A + P P^T, P_n = sqrt(n + 1/2), with positive imaginary part, ascending."""
    A, _ = hippo_legs(states)
    P = torch.sqrt(torch.arange(states, dtype=torch.float64) + 0.5)
    values = torch.linalg.eigvals(A + torch.outer(P, P))
    values = values[values.imag > 0]
    return values[values.imag.argsort()]


def discretise(A, B, dt):
    return torch.exp(dt * A), B * (torch.exp(dt * A) - 1) / A


def recurrence(u, dA, dB, C, D):
    """u: (T,), one channel; dA, dB, C: (N/2,) complex."""
    x = torch.zeros_like(dA)
    outputs = []
    for t in range(len(u)):
        x = dA * x + dB * u[t]
        outputs.append(2 * (C * x).sum().real + D * u[t])
    return torch.stack(outputs), x
