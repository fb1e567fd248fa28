"""What every task's generator returns: tokens, and the answer expected from each position."""

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
