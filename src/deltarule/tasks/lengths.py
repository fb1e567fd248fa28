"""Rows that differ in length: what the formal languages have in common."""

from dataclasses import dataclass

import numpy as np

from deltarule.nn.checks import check_least
from deltarule.tasks.batch import NO_LABEL, Array, Batch


@dataclass(frozen=True)
class Lengths:
    """The range from which each row's length is drawn, the place of the answer counted."""

    shortest: int = 3
    """The least length of a row, 3 or more."""
    longest: int = 40
    """The greatest length of a row."""

    def __post_init__(self) -> None:
        check_least(self, 3, "shortest")
        if self.longest < self.shortest:
            raise ValueError(
                f"longest must be at least shortest={self.shortest}, got {self.longest}"
            )

    @property
    def length(self) -> int:
        """Tokens of a row: nothing is read at the place of the longest row's answer."""
        return self.longest - 1


def one_answer(tokens: Array, places: Array, answers: Array) -> Batch:
    """Rows with one label each: the answer, at its place; both are [rows, 1]."""
    labels = np.full_like(tokens, NO_LABEL)
    np.put_along_axis(labels, places, answers, axis=1)
    return Batch(tokens, labels)
