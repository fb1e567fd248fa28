"""Which launches a forward comes to, written down for the calls like it.

The second call of a kind (the same shapes, strides, types and numbers) is recorded: the compiled
kernels that it launches, and where their arguments lie, in the tensors that it is given or in
memory of its plan. Further ones are replayed (replay.py): what a launch costs the host otherwise is
to find this out. A call that launches with any other tensor is not recorded.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.first_call import compiled_together
from deltarule.ops.delta_rule.triton.plan import Plan, make_plan
from deltarule.ops.delta_rule.triton.tile_sizes import recordings, remember
from deltarule.ops.runtime import launch as direct
from deltarule.ops.runtime.kinds import Kind, kind_of
from deltarule.ops.runtime.launch import Binary, Grid, Launch
from deltarule.ops.runtime.replay import Map, Outputs, Place, Recording, Step

# Bytes: more keep the GPU busy for longer than the host, and one piece would be held to the end.
MOST_ROOM = 2**28
# Bytes between the starts of what shares one piece of memory: what PyTorch takes, too.
GRAIN = 512
# Of a kind of calls that did not come before, or once.
NEW, ONCE = "new", "once"

Forward = Callable[[Inputs, Plan, bool], Outputs]
Compiled = Callable[[Inputs, Plan, bool], object]


class Note(NamedTuple):
    """One launch as it is recorded."""

    launch: Launch
    binary: Binary
    grid: Grid
    arguments: tuple[Any, ...]


@dataclass(eq=False)
class Tape:
    """What a call is given, makes and launches: `notes` is None where nobody can repeat that."""

    given: list[Tensor]
    made: list[Tensor] = field(default_factory=list)
    notes: list[Note] | None = field(default_factory=list)

    def note(self, launch: Launch, grid: Grid, arguments: tuple[Any, ...]) -> None:
        """Write down a launch that went past Triton's search, or that there was another."""
        binary = launch.binary(arguments)
        known = all(self.known(x) for x in arguments if isinstance(x, Tensor))
        if self.notes is None or binary is None or not known:
            self.notes = None
        else:
            self.notes.append(Note(launch, binary, grid, arguments))

    def known(self, x: Tensor) -> bool:
        """Whether x is given, or lies in memory that was made."""
        return any(x is y for y in self.given) or any(shares(x, y) for y in self.made)

    def recording(self, outputs: Outputs) -> Recording | None:
        """The launches in the form in which they are repeated."""
        returned = [next((i for i, y in enumerate(self.made) if x is y), -1) for x in outputs]
        if self.notes is None or -1 in returned:
            return None
        first, places, room = len(self.given), {}, 0
        for i, x in enumerate(self.made):
            if i in returned:
                places[i] = Place(first + returned.index(i), 0)
            else:
                places[i] = Place(first + len(returned), room)
                room += -(-x.nbytes // GRAIN) * GRAIN
        if room > MOST_ROOM:
            return None
        steps = [step(note, self, places) for note in self.notes]
        shapes = [(x.shape, x.dtype) for x in outputs]
        return Recording(shapes, room // 4, steps, [note.launch.kernel for note in self.notes])


@dataclass(frozen=True, eq=False)
class RecordingPlan(Plan):
    """A plan that writes down what it makes and launches."""

    tape: Tape = field(default_factory=lambda: Tape([]))

    def once(self, make: Callable[..., Any], inputs: Inputs, *choices: Hashable) -> Any:
        """What the plan makes; of a launch, one that is written down."""
        made = super().once(make, inputs, *choices)
        return Recorded(made, self.tape) if isinstance(made, Launch) else made

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that is written down."""
        made = super().empty(shape, dtype, device)
        self.tape.made.append(made)
        return made


class Recorded:
    """A launch that is written down after it ran."""

    def __init__(self, launch: Launch, tape: Tape) -> None:
        """Everything but calls is the launch's own."""
        self.launch, self.tape, self.constants = launch, tape, launch.constants

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Run the kernel."""
        self.launch(grid, *arguments)
        self.tape.note(self.launch, grid, arguments)


def recorded(run: Forward, inputs: Inputs, save: bool, whole: Compiled) -> Outputs:
    """run(inputs, plan, save), from its recording where a call like it has one.

    A first call compiles the kernels of `whole`, which may be more than those that it runs.
    """
    if (kind := kind_of_launches(run, inputs, save)) is None:
        return run(inputs, make_plan(inputs), save)
    known = recordings.get(kind.key, NEW)
    if isinstance(known, Recording) and (outputs := known.repeated(kind)) is not None:
        return outputs
    if known is ONCE and kind.aligned and not direct.watched():
        with direct.there(inputs.q.device):
            again, recording = record(run, inputs, save)
        remember(kind.key, recording)
        return again
    plan = make_plan(inputs)
    if known is NEW:
        remember(kind.key, ONCE)
        compiled_together(lambda: whole(inputs, plan, save), inputs, plan, run, save)
    return run(inputs, plan, save)


def found(run: Forward, inputs: Inputs, save: bool) -> Recording | None:
    """The recording of a call."""
    kind = kind_of_launches(run, inputs, save)
    known = None if kind is None else recordings.get(kind.key)
    return known if isinstance(known, Recording) else None


def kind_of_launches(run: Forward, inputs: Inputs, save: bool) -> Kind | None:
    """The kind of a call on a GPU: with these numbers, all that its launches depend on."""
    return kind_of(inputs[:9], run, save, *inputs[9:]) if inputs.q.is_cuda else None


def record(run: Forward, inputs: Inputs, save: bool) -> tuple[Outputs, Recording | None]:
    """Run a call and write it down."""
    # Each argument is a tensor of its own, whatever the caller gave twice.
    tensors: dict[str, Any] = {
        name: x.detach()
        for name, x in zip(inputs._fields, inputs, strict=True)
        if isinstance(x, Tensor)
    }
    plan, tape = make_plan(inputs), Tape(list(tensors.values()))
    watching = RecordingPlan(
        plan.call, plan.chunks, plan.sizes, plan.per_segment, plan.made, tape
    )  # fmt: skip
    outputs = run(inputs._replace(**tensors), watching, save)
    return outputs, tape.recording(outputs)


def shares(x: Tensor, made: Tensor) -> bool:
    """Whether x lies in memory that was made."""
    start = made.data_ptr()
    return start <= x.data_ptr() < start + made.nbytes


def step(note: Note, tape: Tape, places: dict[int, Place]) -> Step:
    """A launch whose arguments are found by their places."""
    fetched = {of.place: of for of in note.binary.fetched}
    values: list[Any] = [*note.grid, None, *note.binary.function]
    addresses, maps = [], []
    for i, x in enumerate(note.arguments):
        if not isinstance(x, Tensor):
            values.append(x)
            continue
        place, start = place_of(x, tape, places), len(values)
        if i in fetched:
            values += (made := direct.map_of(x, fetched[i]))
            known = {x.data_ptr(): made}
            maps.append(Map(slice(start, len(values)), place, known, x.shape, x.dtype, fetched[i]))
        else:
            values.append(None)
            addresses.append((start, place))
    return Step(note.binary, values + note.launch.rest, addresses, maps)


def place_of(x: Tensor, tape: Tape, places: dict[int, Place]) -> Place:
    """Where a known tensor lies."""
    for i, y in enumerate(tape.given):
        if x is y:
            return Place(i, 0)
    made = next(i for i, y in enumerate(tape.made) if shares(x, y))
    piece, offset = places[made]
    return Place(piece, offset + x.data_ptr() - tape.made[made].data_ptr())
