"""Offsets of sequences that lie end to end in one row."""

from collections.abc import Iterable
from itertools import accumulate

import torch

from deltarule.shapes import Offsets


def pack(lengths: Iterable[int]) -> Offsets:
    """Turn the lengths of packed sequences into `cu_seqlens`.

    cu_seqlens[i] = lengths[0] + ... + lengths[i - 1]

    Args:
        lengths: Tokens in each sequence, 0 or more; a sequence may be empty.

    Returns:
        int64 offsets [N + 1] on the CPU, from 0 to the total.

    Raises:
        ValueError: A length is negative or not an integer.

    Examples:
        >>> pack([3, 0, 5])
        tensor([0, 3, 3, 8])
    """
    offsets = [0, *accumulate(_length(length) for length in lengths)]
    return torch.tensor(offsets, dtype=torch.int64)


def _length(length: int) -> int:
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise ValueError(f"lengths must be integers of 0 or more, got {length!r}")
    return length
