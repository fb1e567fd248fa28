"""What is kept of calls for the next ones like them, under one key; nothing here needs Triton."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

# Entries of one cache: lengths of sequences never end.
MOST = 256
# The plans of calls, by what their sizes depend on.
plans: dict[Hashable, Any] = {}
# What is known of the launches of a forward: that it ran ONCE, a `Recording`, or None where nobody
# can repeat it.
recordings: dict[Hashable, Any] = {}
ONCE = "once"
# What kernels were compiled for, side by side, in this process.
compiled: set[Hashable] = set()


class CallKey(NamedTuple):
    """Shapes, strides and types of a call's tensors and its numbers; and the tensors themselves."""

    key: Hashable
    given: list[Tensor]
    addresses: list[int]

    @property
    def aligned(self) -> bool:
        """Whether every address is a multiple of 16: other addresses take other kernels."""
        together = 0
        for address in self.addresses:
            together |= address
        return together % 16 == 0


def call_key(tensors: Iterable[Tensor | None], *others: Hashable) -> CallKey | None:
    """The key of a call with these tensors; None if one of them is more than a tensor."""
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
    return CallKey(tuple(key), given, addresses)


def remember(cache: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """Keep an entry; a full cache starts anew."""
    if len(cache) >= MOST:
        cache.clear()
    cache[key] = found


def forget() -> None:
    """Plan and record anew: a configuration has changed."""
    plans.clear()
    recordings.clear()
