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


def plain(shape: Shape) -> Shape:
    """The shape that the rows have here."""
    return shape


def filters(shape: Shape) -> Shape:
    """[D, W] as the weight of a depthwise `Conv1d`, [D, 1, W]."""
    return shape[0], 1, *shape[1:]


def flat(shape: Shape) -> Shape:
    """All in one axis."""
    return (math.prod(shape),)


def last_joined(shape: Shape) -> Shape:
    """[L, H, K] as [L, H K]."""
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
        alias: Another name under which the tensor may be stored. None: it has one name.

    Examples:
        >>> piece = Piece("qk", ("q", "k"), groups=2)
        >>> q, k = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> piece.write([q, k]).flatten()
        tensor([1., 3., 2., 4.])
    """

    name: str
    parts: tuple[str, ...]
    groups: int = 1
    form: Callable[[Shape], Shape] = plain
    alias: str | None = None

    def shape(self, shapes: Shapes) -> Shape:
        """Return the shape of the stored tensor, from those of the parameters."""
        rows = sum(shapes[part][0] for part in self.parts)
        return self.form((rows, *shapes[self.parts[0]][1:]))

    def read(self, stored: Tensor, shapes: Shapes) -> dict[str, Tensor]:
        """Take the parameters out of the stored tensor; each has memory of its own."""
        if len(self.parts) == 1:
            return {self.parts[0]: stored.reshape(shapes[self.parts[0]])}
        rows = [shapes[part][0] // self.groups for part in self.parts]
        grouped = stored.reshape(self.groups, sum(rows), -1).split(rows, dim=1)
        return {
            part: x.reshape(shapes[part]).clone()
            for part, x in zip(self.parts, grouped, strict=True)
        }

    def write(self, tensors: Sequence[Tensor]) -> Tensor:
        """Put the parameters, in the order of `parts`, into one tensor."""
        shapes = {part: tuple(x.shape) for part, x in zip(self.parts, tensors, strict=True)}
        grouped = [x.reshape(self.groups, len(x) // self.groups, -1) for x in tensors]
        joined = grouped[0] if len(grouped) == 1 else torch.cat(grouped, dim=1)
        return joined.reshape(self.shape(shapes))
