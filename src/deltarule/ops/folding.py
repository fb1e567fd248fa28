"""What torch.func makes of a registered operator.

Under vmap the mapped axis is folded into one that every call has.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Fold(NamedTuple):
    """How vmap folds its axis into one that a call has anyway.

    axis: From the name of an input or output, its tensor of one call, and whether sequences are
        packed, to the axis that grows.
    offsets: From the offsets of one call and the size of the axis to those of the folded call.
    outputs: Names of the outputs.
    """

    axis: Callable[[str, Tensor, bool], int]
    offsets: Callable[[Tensor, int], Tensor]
    outputs: tuple[str, ...]


def repeated_offsets(cu_seqlens: Tensor, size: int) -> Tensor:
    """Offsets of the packed sequences, `size` times one after the other."""
    lengths = cu_seqlens.diff().repeat(size)
    return torch.cat([cu_seqlens[:1], lengths.cumsum(0, dtype=cu_seqlens.dtype)])


def head_axis(name: str, x: Tensor, packed: bool) -> int:
    """Axis of the heads; what is constant over time has no others before it."""
    if name in ("initial_state", "final"):
        return 1
    return 0 if x.ndim == 3 else 2


# A recurrence with more rows, of which packed ones follow each other; and one with more heads.
MORE_ROWS = Fold(
    lambda name, x, packed: int(packed and name not in ("initial_state", "final")),
    repeated_offsets, ("o", "final"),
)  # fmt: skip
MORE_HEADS = Fold(head_axis, lambda cu_seqlens, size: cu_seqlens, ("o", "final"))


class Folding:
    """The rules of an operator and its backward operator."""

    def __init__(self, operator: Any, fold: Fold) -> None:
        self.of, self.fold = operator, fold

    def vmap(self, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        """The operator on folded inputs, which saves nothing: its chunks lie in another order."""
        size, packed = info.batch_size, self.packed(args)
        folded = self.folded(size, in_dims, args)
        outputs = self.of.operator(*folded)
        count = self.of.rules.outputs
        named = zip(self.fold.outputs, outputs[:count], strict=True)
        unfolded = [unfold(x, size, self.fold.axis(name, x, packed)) for name, x in named]
        rest = outputs[count:]
        return (*unfolded, *rest), (*(0 for _ in unfolded), *(None for _ in rest))

    def vmap_backward(
        self, info: Any, in_dims: Sequence[int | None], *args: Any
    ) -> tuple[list[Tensor], list[int | None]]:
        size, outputs = info.batch_size, self.of.rules.outputs
        first = outputs + len(self.of.rules.saved)
        gradients, saved, given, wanted = self.of.split(args)
        packed = self.packed(given)
        d_folded = [
            None if d is None
            else fold_one(d, dim, size, self.fold.axis(name, alone(d, dim), packed))
            for name, d, dim in zip(self.fold.outputs, gradients, in_dims[:outputs], strict=True)
        ]  # fmt: skip
        folded = self.folded(size, in_dims[first:-1], given)
        nothing = [x.new_empty(0) for x in saved]
        found = self.of.backward_operator(*d_folded, *nothing, *folded, wanted)
        there = [
            want and folded[i] is not None for i, want in zip(self.of.places, wanted, strict=True)
        ]
        unfolded = [
            unfold(dx, size, self.fold.axis(self.of.names[i], dx, packed)) if known else dx
            for i, dx, known in zip(self.of.places, found, there, strict=True)
        ]
        return unfolded, [0 if known else None for known in there]

    def packed(self, given: Sequence[Any]) -> bool:
        return given[self.of.names.index("cu_seqlens")] is not None

    def folded(self, size: int, in_dims: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """The inputs with the mapped axis folded in, and nothing saved."""
        offsets = self.of.names.index("cu_seqlens")
        if in_dims[offsets] is not None:
            raise NotImplementedError("vmap cannot map cu_seqlens: give every row the same offsets")
        packed, folded = self.packed(given), list(given)
        for i, (name, x, dim) in enumerate(zip(self.of.names, given, in_dims, strict=False)):
            if i == offsets:
                folded[i] = None if x is None else self.fold.offsets(x, size)
            elif isinstance(x, Tensor):
                folded[i] = fold_one(x, dim, size, self.fold.axis(name, alone(x, dim), packed))
            elif name == "save":
                folded[i] = False
        return folded


def alone(x: Tensor, dim: int | None) -> Tensor:
    """The tensor of one call among those that are mapped."""
    return x if dim is None else x.select(dim, 0)


def fold_one(x: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    mapped = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return mapped.movedim(0, axis).flatten(axis, axis + 1)


def unfold(x: Tensor, size: int, axis: int) -> Tensor:
    return x.unflatten(axis, (size, -1)).movedim(axis, 0)


def transformed(operator: Any, setup_context: Any, backward: Any, jvp: Any) -> Any:
    """An operator in the form that torch.func.grad and its kin look for."""

    def forward(*args: Any) -> Any:
        outputs = operator(*args)
        return outputs if isinstance(outputs, Tensor) else tuple(outputs)

    rules = {
        "generate_vmap_rule": True, "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context), "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
    }  # fmt: skip
    return type("Transformed", (torch.autograd.Function,), rules)
