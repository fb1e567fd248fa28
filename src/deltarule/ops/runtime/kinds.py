"""What tells calls apart for everything that is kept of a call for the next one like it."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter


class Kind(NamedTuple):
    """Shapes, strides and types of a call, and its own tensors and their addresses."""

    key: Hashable
    given: list[Tensor]
    addresses: list[int]

    @property
    def aligned(self) -> bool:
        """Whether every tensor lies on the grid of 16 bytes: for others there are other kernels."""
        together = 0
        for address in self.addresses:
            together |= address
        return together % 16 == 0


def kind_of(tensors: Iterable[Tensor | None], *others: Hashable) -> Kind | None:
    """The kind of a call with these tensors; None if one is elsewhere, or more than a tensor."""
    given, addresses = [], []
    key: list[Hashable] = [*others]
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) is Tensor or type(x) is Parameter:
            given.append(x)
            addresses.append(x.data_ptr())
            key += x.dtype, x.shape, x.stride(), x.device
        else:
            return None
    return Kind(tuple(key), given, addresses)
