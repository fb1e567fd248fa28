"""Offsets of sequences that lie end to end in one row: made, and checked."""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from numbers import Integral

import torch
from torch import Tensor

from deltarule.ops.checks import check_dense, readable, shape
from deltarule.shapes import Offsets


def pack(lengths: Iterable[int] | Tensor) -> Offsets:
    """Turn the lengths of packed sequences into `cu_seqlens`.

    cu_seqlens[i] = lengths[0] + ... + lengths[i - 1]

    Args:
        lengths: Tokens in each sequence, 0 or more; a sequence may be empty. A tensor's are read.

    Returns:
        int64 offsets [N + 1] on the CPU, from 0 to the total.

    Raises:
        ValueError: A length is negative or not an integer.

    Examples:
        >>> pack([3, 0, 5])
        tensor([0, 3, 3, 8])
    """
    if isinstance(lengths, Tensor):
        lengths = lengths.tolist()
    if not isinstance(lengths, Iterable):
        raise ValueError(f"lengths must be a list of integers of 0 or more, got {lengths!r}")
    numbers = [*lengths]
    for length in numbers:
        if isinstance(length, bool) or not isinstance(length, Integral) or length < 0:
            raise ValueError(f"lengths must be integers of 0 or more, got {length!r}")
    return torch.tensor([0, *accumulate(map(int, numbers))], dtype=torch.int64)


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """Offsets of packed sequences; their values are read only where that costs no waiting."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        given = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens must be an int32 or int64 tensor, got {given}")
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"cu_seqlens must be [N + 1], got {shape(cu_seqlens)}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row: B must be 1, got {q.shape[0]}")
    if cu_seqlens.device.type not in ("cpu", q.device.type):
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, but q is on {q.device}")
    if not readable(cu_seqlens):
        return
    offsets, tokens = cu_seqlens.tolist(), q.shape[1]
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
    for i, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(f"cu_seqlens must not decrease, got {start} then {end} at {i + 1}")
    if offsets[-1] != tokens:
        raise ValueError(f"cu_seqlens must end at T = {tokens}, got {offsets[-1]}")
