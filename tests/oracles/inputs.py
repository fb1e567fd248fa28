"""Inputs that are the same on every machine and in every release: no random generator."""

import math

import torch


def wave(seed, *shape):
    """Numbers in [-1, 1] without a visible pattern, float64."""
    n = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return torch.sin(1.37 * (n + 11 * seed) ** 1.5).reshape(shape)
