"""Channels to heads."""

from torch import Tensor


def split(x: Tensor, *sizes: int) -> Tensor:
    """[..., product of sizes] -> [..., *sizes]."""
    return x.reshape(*x.shape[:-1], *sizes)


def per_step(x: Tensor, n_steps: int, *sizes: int) -> Tensor:
    """[B, T, n * S] -> [B, T * n, *sizes]: row t * n + j is the j-th part of token t."""
    batch, tokens, channels = x.shape
    channels //= n_steps
    return split(x.reshape(batch, tokens * n_steps, channels), *sizes or (channels,))
