"""What tasks have in common: tokens, the answer expected from each position, rows that differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltarule.nn.checks import check_least, check_that

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


@dataclass(frozen=True)
class Lengths:
    """The range from which each row's length is drawn, the place of the answer counted."""

    shortest: int = 3
    """The least length of a row, 3 or more."""
    longest: int = 40
    """The greatest length of a row."""

    def __post_init__(self) -> None:
        check_least(self, 3, "shortest")
        said = f"longest must be at least shortest={self.shortest}"
        check_that(self.longest >= self.shortest, said, self.longest)

    @property
    def length(self) -> int:
        """Tokens of a row: nothing is read at the place of the longest row's answer."""
        return self.longest - 1


def one_answer(tokens: Array, places: Array, answers: Array) -> Batch:
    """Rows with one label each: the answer, at its place; both are [rows, 1]."""
    labels = np.full_like(tokens, NO_LABEL)
    np.put_along_axis(labels, places, answers, axis=1)
    return Batch(tokens, labels)
