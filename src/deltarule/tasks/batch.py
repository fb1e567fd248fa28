"""What every task's generator returns: tokens, and the answer expected from each position."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]

# What a position without a label holds, as PyTorch's cross entropy expects.
NO_LABEL = -100


class Batch(NamedTuple):
    """Tokens, and the answer at each position that has one; both int64 [rows, length].

    `labels[r, t]` is what a model should say after it has read `tokens[r, : t + 1]`; where nothing
    is asked it is NO_LABEL. A task whose score needs more has a tuple of its own, which begins with
    these two and goes on with arrays of one entry a row.
    """

    tokens: Array
    labels: Array


def with_answers(word: Callable[[int], str], tokens: Sequence[int], labels: Sequence[int]) -> str:
    """Tokens in words, with an arrow to the answer where one is asked for.

    Examples:
        >>> with_answers("abcd".__getitem__, [0, 1, 2], [NO_LABEL, 3, NO_LABEL])
        'a b->d c'
    """
    return " ".join(
        word(token) if label == NO_LABEL else f"{word(token)}->{word(label)}"
        for token, label in zip(tokens, labels, strict=True)
    )
