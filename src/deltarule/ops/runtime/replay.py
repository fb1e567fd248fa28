"""The launches of a call once more: nothing in them is new but addresses and the stream.

What the kernels write is taken in one piece, the room, but for the tensors that are returned.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.runtime import launch
from deltarule.ops.runtime.kinds import Kind
from deltarule.ops.runtime.launch import Binary, Fetched

# Where the stream is among the arguments of a launcher: after the grid.
STREAM = 3

Outputs = tuple[Tensor, ...]


class Place(NamedTuple):
    """Bytes after the start of one of the pieces: what is given, what is returned, and the room."""

    piece: int
    offset: int


class Map(NamedTuple):
    """Where a tensor map goes among the arguments, and what the map is of."""

    arguments: slice
    place: Place
    # By address: the map, and the sizes that go with it.
    made: dict[int, list[Any]]
    shape: torch.Size
    dtype: torch.dtype
    fetched: Fetched


class Step(NamedTuple):
    """One launch: what its launcher is called with, and which of that is new in every call."""

    binary: Binary
    values: list[Any]
    addresses: list[tuple[int, Place]]
    maps: list[Map]


class Recording(NamedTuple):
    """Shapes and types of what is returned, float32 numbers of room, launches and their kernels.

    The launches read the constants at the addresses that these have.
    """

    returned: list[tuple[torch.Size, torch.dtype]]
    room: int
    steps: list[Step]
    kernels: list[Any]
    constants: tuple[Tensor, ...] = ()

    def repeated(self, kind: Kind) -> Outputs | None:
        """The outputs of one more call of the kind; None where it is for Triton to launch it."""
        if not kind.aligned or launch.watched(*self.kernels):
            return None
        with launch.there(kind.given[0].device):
            return self.launched(kind.given, kind.addresses)

    def launched(self, given: list[Tensor], addresses: list[int]) -> Outputs:
        """Launch everything again on the current device."""
        device = given[0].device
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.returned]
        room = torch.empty(self.room, dtype=torch.float32, device=device)
        pieces = [*given, *outputs, room]
        starts = [*addresses, *[x.data_ptr() for x in outputs], room.data_ptr()]
        stream = launch.stream_of(device)
        for binary, values, news, maps in self.steps:
            # Another thread may be here.
            values = values.copy()
            values[STREAM] = stream
            for argument, (piece, offset) in news:
                values[argument] = starts[piece] + offset
            for of in maps:
                piece, offset = of.place
                made = of.made.get(starts[piece] + offset)
                values[of.arguments] = made or new_map(of, pieces[piece], starts[piece] + offset)
            binary.launcher(*values)
        return tuple(outputs)


def new_map(of: Map, piece: Tensor, address: int) -> list[Any]:
    """The map of what lies at an address in this piece, kept for the next call."""
    size, start = of.shape.numel() * of.dtype.itemsize, address - piece.data_ptr()
    flat = piece.detach().view(-1).view(torch.uint8)
    x = flat[start : start + size].view(of.dtype).view(of.shape)
    if len(of.made) >= launch.MOST:
        of.made.clear()
    of.made[address] = made = launch.map_of(x, of.fetched)
    return made
