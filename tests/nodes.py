"""What autograd notes of a call: the nodes behind what it returns, and the tensors they keep."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def nodes_of(y: Tensor) -> list[str]:
    """The names of all nodes that a gradient of y goes through."""
    seen, left = set(), [y.grad_fn]
    while left:
        if (node := left.pop()) is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return [type(node).__name__ for node in seen]


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """What is kept for a backward pass of all that is computed inside."""
    tensors: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: tensors.append(x) or x, lambda x: x
    ):  # fmt: skip
        yield tensors
