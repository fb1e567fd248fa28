"""Calls of a few tokens that nothing differentiates: decoding, for which chunks are a detour."""

from collections.abc import Iterable

import torch
from torch import Tensor

MAX_TOKENS = 16


def decodes(x: Tensor, cu_seqlens: Tensor | None, others: Iterable[object]) -> bool:
    """Whether a call of x [B, T, ...] and others can go token by token, without a gradient.

    Packed rows go by chunks: only the GPU knows how many tokens a sequence of theirs has.
    """
    if cu_seqlens is not None or not 1 <= x.shape[1] <= MAX_TOKENS or x.shape[0] == 0:
        return False
    # An exported program keeps the form that holds for every length.
    if torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    tensors = (y for y in (x, *others) if isinstance(y, Tensor))
    return not (torch.is_grad_enabled() and any(y.requires_grad for y in tensors))


def check_no_gradient(function: str, tensors: Iterable[Tensor | None]) -> None:
    """What is written in place has no gradient."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{function} has no gradient, got an argument that requires one: call it under "
            "torch.no_grad(), or use delta_rule or dplr"
        )
