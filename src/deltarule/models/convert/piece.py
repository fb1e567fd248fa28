"""How a tensor of a checkpoint holds the tensors of a `CausalLM`: its rows are theirs.

stored = [rows of part 1, rows of part 2, ...] for group 1, the same for group 2, ...
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# Whether a folder that is read has a tensor of that name; no when one is written.
Has = Callable[[str], bool]
Form = Callable[[Shape], Shape]


def plain(shape: Shape) -> Shape:
    return shape


def filters(shape: Shape) -> Shape:
    return shape[0], 1, *shape[1:]


def flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def last_joined(shape: Shape) -> Shape:
    return *shape[:-2], shape[-2] * shape[-1]


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the parameters whose rows it holds.

    Args:
        name: Of the stored tensor.
        parts: Names of parameters, in the order of their rows.
        groups: Into how many equal groups the rows of each part are cut; the stored rows are
            group by group.
        form: From the shape that the rows have here to the shape that is stored.
        rows: The first and the last but one of the rows of the one part, its first two axes taken
            as one, that are stored here. None: all.
    """

    name: str
    parts: tuple[str, ...]
    groups: int = 1
    form: Form = plain
    rows: tuple[int, int] | None = None

    def shape(self, shapes: Shapes) -> Shape:
        """Return the shape of the stored tensor, from those of the parameters."""
        if self.rows is not None:
            return self.form((self.rows[1] - self.rows[0], *shapes[self.parts[0]][2:]))
        rows = sum(shapes[part][0] for part in self.parts)
        return self.form((rows, *shapes[self.parts[0]][1:]))

    def read(self, stored: Tensor, shapes: Shapes, found: dict[str, Tensor]) -> None:
        """Put the parameters of the stored tensor among those found, each in its own memory."""
        first = self.parts[0]
        if self.rows is not None:
            whole = found.setdefault(first, stored.new_empty(shapes[first]))
            if whole.dtype != stored.dtype:
                raise ValueError(
                    f"tensor {self.name!r} is {stored.dtype}, but others of {first!r} are "
                    f"{whole.dtype}: give them one dtype"
                )
            own = whole.flatten(0, 1)[slice(*self.rows)]
            own.copy_(stored.reshape(own.shape))
            return
        if len(self.parts) == 1:
            found[first] = stored.reshape(shapes[first])
            return
        rows = [shapes[part][0] // self.groups for part in self.parts]
        grouped = stored.reshape(self.groups, sum(rows), -1).split(rows, dim=1)
        for part, x in zip(self.parts, grouped, strict=True):
            found[part] = x.reshape(shapes[part]).clone()

    def write(self, tensors: Sequence[Tensor]) -> Tensor:
        """Put the parameters, in the order of `parts`, into one tensor."""
        if self.rows is not None:
            own = tensors[0].flatten(0, 1)[slice(*self.rows)]
            return own.reshape(self.form(tuple(own.shape)))
        shapes = {part: tuple(x.shape) for part, x in zip(self.parts, tensors, strict=True)}
        grouped = [x.reshape(self.groups, len(x) // self.groups, -1) for x in tensors]
        joined = grouped[0] if len(grouped) == 1 else torch.cat(grouped, dim=1)
        return joined.reshape(self.shape(shapes))
