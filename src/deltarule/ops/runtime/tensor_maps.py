"""Tensor maps: what the copy engine of a Hopper GPU fetches tiles of a tensor by.

Triton makes them anew in every launch. Here they are made once for an address and a size, by
Triton's own function, and handed to the launcher behind the step that makes them.
"""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

# Maps of one argument that are kept: addresses never end.
MOST = 1024
# Columns of a matrix; or its heads and the channels of each, where a tile ends at a head's last.
Width = int | tuple[int, int]
# By the name of an argument: the width of the matrix that it is, and the tile that is fetched.
Tiles = Mapping[str, tuple[Width, list[int]]]


class Fetched(NamedTuple):
    """An argument that the copy engine fetches, and what the compiler left about its tiles.

    `maps` has, by address and size, a map and the sizes that a launcher takes after it.
    """

    place: int
    width: Width
    tile: list[int]
    metadata: Any
    maps: dict[tuple[int, int], list[Any]]

    def map_of(self, x: Tensor) -> list[Any]:
        key = x.data_ptr(), x.numel()
        if (found := self.maps.get(key)) is None:
            if len(self.maps) >= MOST:
                self.maps.clear()
            found = self.maps[key] = self.new_map(x)
        return found

    def new_map(self, x: Tensor) -> list[Any]:
        make = vars(inspect.getmodule(driver.active.launcher_cls))["make_tensordesc_arg"]
        # Triton 3.9 passes a third argument, which it does not use.
        unused = [None] * (len(inspect.signature(make).parameters) - 2)
        made: list[Any] = make(described(x, self.width, self.tile), self.metadata, *unused)
        return made


# Of a tile [1, 1, rows, columns] the copy engine moves n rows from row r on; others count as zero
# and are not written. They lie outside of a tensor of FAR rows, of which row r is row FAR - n; two
# more axes bring its start back to x, modulo 2^64 as addresses are (triton/tools/ragged_tma.py):
#     FAR (2^34 - width) + (r + n) width + (FAR - n) width = 2^64 + r width    elements
FAR, WIDE = 2**30, 2**31 - 2**16


def described(x: Tensor, width: Width, tile: list[int]) -> TensorDescriptor:
    """x as a matrix of this width, in tiles that the copy engine fetches."""
    axes = [width] if isinstance(width, int) else [*width]
    row, inner = math.prod(axes), [*axes[1:], 1]
    if len(tile) == 1 + len(axes):
        return TensorDescriptor(x, [x.numel() // row, *axes], [row, *inner], tile)
    return TensorDescriptor(x, [WIDE, WIDE, FAR, *axes], [2**34 - row, row, row, *inner], tile)


def with_maps(
    fetched: Sequence[Fetched], arguments: tuple[Any, ...], values: list[Any]
) -> list[Any]:
    """The values with each fetched tensor's map and sizes in place of its address."""
    out: list[Any] = []
    start = 0
    for of in fetched:
        out += values[start : of.place]
        out += of.map_of(arguments[of.place])
        start = of.place + 1
    return out + values[start:]


class Part(NamedTuple):
    """A tensor that lies in a piece, so many bytes after its start."""

    piece: int
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def of(self, pieces: Sequence[Tensor]) -> Tensor:
        piece = pieces[self.piece]
        start = (piece.storage_offset() * piece.itemsize + self.offset) // self.dtype.itemsize
        x = torch.empty(0, dtype=self.dtype, device=piece.device)
        return x.set_(piece.untyped_storage(), start, self.shape, ())


class Map(NamedTuple):
    """Where a map goes among the values of a launch, and what tensor it is of."""

    values: slice
    part: Part
    fetched: Fetched

    def found(self, pieces: Sequence[Tensor], starts: Sequence[int]) -> list[Any]:
        key = starts[self.part.piece] + self.part.offset, self.part.shape.numel()
        if (made := self.fetched.maps.get(key)) is not None:
            return made
        return self.fetched.map_of(self.part.of(pieces))


def launcher_of_maps(launcher: Any) -> Any:
    """The launcher without its first step, which makes tensor maps; None if it has another form."""
    wrapped = getattr(launcher, "launch", None)
    if not inspect.isfunction(wrapped) or wrapped.__name__ != "inner":
        return None
    inner = inspect.getclosurevars(wrapped).nonlocals.get("launcher")
    if inner is None or "make_tensordesc_arg" not in vars(inspect.getmodule(type(launcher)) or {}):
        return None
    bare = copy.copy(launcher)
    bare.launch = inner
    return bare
