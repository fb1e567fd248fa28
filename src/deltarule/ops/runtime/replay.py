"""The launches of a forward or a backward, written down once and repeated for calls like it.

The second call of a key (dispatch.py) is recorded, unless it computes outside of kernels: which it
launches, and whether each argument lies in a tensor that is given, in memory that it allocates, or
in a constant of its plan. That is what a launch costs the host. Later calls differ in addresses and
stream alone. They allocate what they return, and in one piece, the room, what else is written.
"""

import math
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce, update_wrapper
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from deltarule.ops.dispatch import ONCE, CallKey, call_key, recordings, remember
from deltarule.ops.runtime import launch
from deltarule.ops.runtime.chained import CHAIN
from deltarule.ops.runtime.launch import Binary, Grid, Launch
from deltarule.ops.runtime.tensor_maps import Map, Part

# Bytes: with more the GPU is busy for longer than the host, and one piece is held to the end.
MOST_ROOM = 2**28
# Bytes that the parts of the room are aligned to, as by PyTorch's allocator.
GRAIN = 512
# Operators that take memory and write nothing there.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# Sets of addresses that a recording keeps: a deep model has some for each layer.
MOST_READY = 64

Outputs = tuple[Tensor | None, ...]
# Launchers, and what each is called with.
Calls = list[tuple[Callable[..., None], list[Any]]]
# One of the pieces (what is given, what is returned, and the room), and bytes after its start.
Place = tuple[int, int]
# A launch as it is recorded.
Note = tuple[Launch, Binary, Grid, tuple[Any, ...]]


class Step(NamedTuple):
    """One launch: the arguments of its launcher, and which of them are new in every call."""

    binary: Binary
    values: list[Any]
    addresses: list[tuple[int, Place]]
    maps: list[Map]


class Recording(NamedTuple):
    """What is made, how much of that is returned, launches and their kernels.

    `made` has a number with the shape of each tensor returned, or its part, and, last, of the room.
    `ready` has launchers and their arguments by all addresses of a call, which tend to come again,
    and `backward` what follows a forward, by kinds of the gradient.
    """

    made: list[Tensor | Part | None]
    returned: int
    steps: list[Step]
    kernels: list[Any]
    ready: dict[tuple[int, ...], Calls]
    backward: dict[Hashable, "Recording"]

    def repeated(self, call: CallKey) -> Outputs | None:
        """The outputs of one more call of the key; None where Triton has to launch it."""
        if reduce(or_, call.addresses) % launch.ALIGNED or launch.watched(*self.kernels):
            return None
        # Mostly there is no context to enter.
        if launch.is_here(device := call.given[0].device):
            return self.launched(call)
        with torch.cuda.device(device):
            return self.launched(call)

    def launched(self, call: CallKey) -> Outputs:
        made, addresses = [], call.addresses.copy()
        for of in self.made:
            x = torch.empty_like(of) if isinstance(of, Tensor) else of and of.of(call.given)
            made.append(x)
            addresses.append(0 if x is None else x.data_ptr())
        starts = *addresses, driver.active.get_current_stream(call.given[0].device.index)
        for launcher, values in self.ready.get(starts) or self.calls([*call.given, *made], starts):
            launcher(*values)
        return tuple(made[: self.returned])

    def calls(self, pieces: list[Any], starts: tuple[int, ...]) -> Calls:
        """The launches with their new arguments, kept for later; the stream is the last start."""
        calls = []
        for step in self.steps:
            values = step.values.copy()
            for argument, (piece, offset) in step.addresses:
                values[argument] = starts[piece] + offset
            for of in step.maps:
                values[of.values] = of.found(pieces, starts)
            calls.append((step.binary.launcher, values))
        if len(self.ready) >= MOST_READY:
            self.ready.clear()
        self.ready[starts] = calls
        return calls


class Tape(TorchDispatchMode):
    """What a call is given, makes and launches; `notes` is None once it cannot be repeated."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = given
        self.made: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.notes: list[Note] | None = []

    def note(
        self, kernel: Launch, binary: Binary | None, grid: Grid, arguments: tuple[Any, ...]
    ) -> None:
        """Write down a launch that can go past Triton's search, or that there was another."""
        known = all(self.holder(x) is not None for x in arguments if isinstance(x, Tensor))
        if self.notes is None or binary is None or not known:
            self.notes = None
        else:
            self.notes.append((kernel, binary, grid, arguments))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take note of an operator of PyTorch: it allocates memory, views some, or computes."""
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ALLOCATIONS or (name == "new_full" and marks(found, args[2])):
            self.made.append(found)
        elif not func.is_view and not (name == "fill_" and marks(*args)):
            self.notes = None
        return found

    def holder(self, x: Tensor) -> Tensor | None:
        """What x is or begins in: the only one of the tensors given; or one made, or a constant."""
        if any(x is y for y in self.given):
            return x
        around = [y for y in self.given if shares(x, y)]
        if len(around) == 1:
            return around[0]
        return next((y for y in (*self.made, *self.constants) if shares(x, y)), None)

    def recording(self, outputs: Outputs) -> Recording | None:
        first, device, room = len(self.given), self.given[0].device, 0
        places = {id(x): (i, 0) for i, x in enumerate(self.given)}
        made: list[Any] = [None if x is None else self.part_of(x, places) for x in outputs]
        for i, x in enumerate(outputs):
            if x is not None and made[i] is None:
                if (whole := next((y for y in self.made if is_all(x, y)), None)) is None:
                    return None
                places[id(whole)] = first + i, 0
                made[i] = number_of(x.dtype, device).expand(x.shape)
        for x in self.made:
            if id(x) not in places:
                places[id(x)] = first + len(outputs), room
                room += -(-extent(x) // GRAIN) * GRAIN
        if self.notes is None or room > MOST_ROOM:
            return None
        made += [number_of(torch.float32, device).expand(room // 4)] if room else []
        steps = [self.step(note, places, (first + len(made), 0)) for note in self.notes]
        return Recording(made, len(outputs), steps, [note[0].kernel for note in self.notes], {}, {})

    def step(self, note: Note, places: dict[int, Place], stream: Place) -> Step:
        """A launch whose arguments are found by their places."""
        kernel, binary, grid, arguments = note
        fetched = {of.place: of for of in binary.fetched}
        values: list[Any] = [*grid, None, *binary.function]
        addresses, maps = [(len(grid), stream)], []
        for i, x in enumerate(arguments):
            if not isinstance(x, Tensor):
                values.append(x)
                continue
            start = len(values)
            values += fetched[i].map_of(x) if i in fetched else [x.data_ptr()]
            if (part := self.part_of(x, places)) is None:
                continue
            if i in fetched:
                maps.append(Map(slice(start, len(values)), part, fetched[i]))
            else:
                addresses.append((start, part[:2]))
        return Step(binary, values + kernel.rest, addresses, maps)

    def part_of(self, x: Tensor, places: dict[int, Place]) -> Part | None:
        """Where a known tensor lies, by the holders' places; None if that is always the same."""
        holder = self.holder(x)
        if holder is None or (place := places.get(id(holder))) is None:
            return None
        offset = place[1] + x.data_ptr() - holder.data_ptr()
        return Part(place[0], offset, x.shape, x.dtype)


class Recorded:
    """run(inputs, *more), of which a call like two before is the launches of the second.

    It is given a named tuple and further arguments, which are tensors, numbers and words, and
    returns whole tensors that it has made. Before the first call like it goes `first`.
    """

    def __init__(
        self, run: Callable[..., Outputs], first: Callable[..., None] | None = None
    ) -> None:
        update_wrapper(self, run)
        self.run, self.first = run, first

    def key(self, *arguments: Any) -> CallKey | None:
        return call_key(arguments, self.run, CHAIN.get())

    def __call__(self, inputs: Any, *more: Any) -> Any:
        key = self.key(*inputs, *more)
        if key is None or not key.given[0].is_cuda:
            return self.run(inputs, *more)
        known = recordings.get(key.key)
        if isinstance(known, Recording) and (outputs := known.repeated(key)) is not None:
            return outputs
        unusual = reduce(or_, key.addresses) % launch.ALIGNED or launch.watched()
        if key.key not in recordings:
            remember(recordings, key.key, ONCE)
            if self.first is not None:
                self.first(inputs, *more)
        elif known is ONCE and not (unusual or torch.cuda.is_current_stream_capturing()):
            return self.record(key, inputs, more)
        return self.run(inputs, *more)

    def record(self, key: CallKey, inputs: Any, more: tuple[Any, ...]) -> Outputs:
        # Each argument is a tensor of its own, whatever the caller gave twice.
        given = [x.detach() if isinstance(x, Tensor) else x for x in (*inputs, *more)]
        tape = Tape([x for x in given if isinstance(x, Tensor)])
        token = launch.TAPE.set(tape)
        try:
            with launch.there(key.given[0].device), tape:
                outputs = self.run(type(inputs)(*given[: len(inputs)]), *given[len(inputs) :])
        finally:
            launch.TAPE.reset(token)
        remember(recordings, key.key, tape.recording(outputs))
        return outputs

    def recording(self, *arguments: Any) -> tuple[Recording, CallKey] | None:
        key = self.key(*arguments)
        known = None if key is None else recordings.get(key.key)
        return (known, key) if key is not None and isinstance(known, Recording) else None


@cache
def number_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number in memory of no graph: another thread is outside of what this one records."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(torch.empty, (), dtype=dtype, device=device).result()


def marks(x: Tensor, value: float) -> bool:
    """Whether deterministic algorithms fill new memory with this value, that of a replay too."""
    if x.is_floating_point():
        return math.isnan(value)
    return value in (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)


def is_all(x: Tensor, made: Tensor) -> bool:
    """Whether x is a tensor that was made, and not a part of it."""
    whole = x.is_contiguous() and x.nbytes == made.nbytes > 0
    return whole and x.data_ptr() == made.data_ptr()


def shares(x: Tensor, other: Tensor) -> bool:
    return 0 <= x.data_ptr() - other.data_ptr() < extent(other)


def extent(x: Tensor) -> int:
    """Bytes from a tensor's first number to its last, of which it may repeat some or leave some."""
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (1 + last) * x.itemsize
