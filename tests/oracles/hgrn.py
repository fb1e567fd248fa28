"""HGRN (Qin et al. 2023, arXiv 2311.04823, section 3; released hgru-pytorch).

    mu_t = sigmoid(.),  lambda_t = gamma + (1 - gamma) mu_t     gamma: the layer's lower bound
    h_t = lambda_t e^{i theta} h_{t-1} + (1 - lambda_t) c_t     c complex: SiLU of both parts
    o_t = g_t * norm([Re h_t, Im h_t])                          norm and gate belong to the layer

theta is a parameter, not data: it starts at 10000^(-2 i / D). The real form drops it. Lower bounds
of layers 0 .. L-1: softmax over layers, running sum, minus the first row; layer 0 has none.
The input gate is 1 - lambda with lambda AFTER the lower bound.
"""

import torch


def lower_bounds(parameter):
    """parameter: (L, D) -> (L, D), rows ascending from 0."""
    probabilities = parameter.softmax(0)
    return probabilities.cumsum(0) - probabilities[0]


def first_angles(dim):
    return 10000.0 ** (-2 / dim * torch.arange(dim, dtype=torch.float64))


def recurrence(c, forget, lower_bound, theta=None):
    """c: (T, D), complex where theta is given; forget: (T, D), pre-activation; theta: (D,)."""
    h = torch.zeros_like(c[0])
    outputs = []
    for t in range(len(c)):
        gate = lower_bound + (1 - lower_bound) * torch.sigmoid(forget[t])
        turned = h if theta is None else torch.polar(torch.ones_like(theta), theta) * h
        h = gate * turned + (1 - gate) * c[t]
        outputs.append(h)
    return torch.stack(outputs), h
