"""What every kernel here asks of a row: that its elements follow each other."""

from torch import Tensor


def adjacent(x: Tensor) -> Tensor:
    """The tensor, whatever its other strides, or a copy if its last is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
