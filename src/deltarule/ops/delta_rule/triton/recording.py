"""Which launches a forward or a backward comes to, written down for the calls like it.

The second call of a kind (the same shapes, strides, types and numbers) is recorded: the compiled
kernels that it launches, and where their arguments lie, in the tensors that it is given, in memory
that it takes or in what its plan keeps. Further ones are replayed (replay.py): what a launch
costs the host otherwise is to find this out. A call that computes anything else from what it is
given is not recorded.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.first_call import compiled_together
from deltarule.ops.delta_rule.triton.plan import Plan, capturing, make_plan
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

# From inputs, a plan, a choice and further tensors.
Run = Callable[..., Outputs]
Compiled = Callable[..., object]
# Operators that take memory and write nothing there.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


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
    constants: list[Tensor] = field(default_factory=list)
    notes: list[Note] | None = field(default_factory=list)

    def note(self, launch: Launch, grid: Grid, arguments: tuple[Any, ...]) -> None:
        """Write down a launch that went past Triton's search, or that there was another."""
        binary = launch.binary(arguments)
        known = all(self.known(x) for x in arguments if isinstance(x, Tensor))
        if self.notes is None or binary is None or not known:
            self.notes = None
        else:
            self.notes.append(Note(launch, binary, grid, arguments))

    def see(self, operator: Any, args: tuple[Any, ...], found: Any) -> None:
        """Take note of an operator of PyTorch: it takes memory, looks at some, or does more."""
        name = operator.overloadpacket.__name__
        if name in ALLOCATIONS or (name == "new_full" and marks(found, args[2])):
            self.made.append(found)
        elif not operator.is_view and not (name == "fill_" and marks(*args)):
            self.notes = None

    def known(self, x: Tensor) -> bool:
        """Whether x lies in what is given or made, or is the same in every call."""
        return (
            self.place_given(x) is not None
            or any(shares(x, y) for y in self.made)
            or self.constant(x)
        )

    def place_given(self, x: Tensor) -> int | None:
        """Which of the tensors that are given it is, or the only one that it lies in."""
        for i, y in enumerate(self.given):
            if x is y:
                return i
        around = [i for i, y in enumerate(self.given) if shares(x, y)]
        return around[0] if len(around) == 1 else None

    def constant(self, x: Tensor) -> bool:
        """Whether x is the same in every call."""
        return any(shares(x, y) for y in self.constants)

    def recording(self, outputs: Outputs) -> Recording | None:
        """The launches in the form in which they are repeated."""
        returned = [next((i for i, y in enumerate(self.made) if is_all(x, y)), -1) for x in outputs]
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
        kernels = [note.launch.kernel for note in self.notes]
        return Recording(shapes, room // 4, steps, kernels, tuple(self.constants))


class Watch(TorchDispatchMode):
    """Shows every operator of PyTorch to a tape."""

    def __init__(self, tape: Tape) -> None:
        """Nothing is changed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        found = func(*args, **(kwargs or {}))
        self.tape.see(func, args, found)
        return found


@dataclass(frozen=True, eq=False)
class RecordingPlan(Plan):
    """A plan that writes down what it launches."""

    tape: Tape = field(default_factory=lambda: Tape([]))

    def once(self, make: Callable[..., Any], inputs: Inputs, *choices: Hashable) -> Any:
        """What the plan makes; of a launch, one that is written down."""
        made = super().once(make, inputs, *choices)
        return Recorded(made, self.tape) if isinstance(made, Launch) else made

    def constant(self, make: Callable[..., Tensor], inputs: Inputs) -> Tensor:
        """A constant that is written down; PyTorch's operators that make it are not."""
        with _disable_current_modes():
            constant = super().constant(make, inputs)
        self.tape.constants.append(constant)
        return constant


class Recorded:
    """A launch that is written down after it ran."""

    def __init__(self, launch: Launch, tape: Tape) -> None:
        """Everything but calls is the launch's own."""
        self.launch, self.tape, self.constants = launch, tape, launch.constants

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Run the kernel."""
        self.launch(grid, *arguments)
        self.tape.note(self.launch, grid, arguments)


def recorded(
    run: Run, inputs: Inputs, choice: bool, whole: Compiled, more: tuple[Tensor, ...] = ()
) -> Outputs:
    """run(inputs, plan, choice, *more), from its recording where a call like it has one.

    A first call compiles the kernels of `whole`, which may be more than those that it runs.
    """
    if (kind := kind_of_launches(run, inputs, choice, more)) is None:
        return run(inputs, make_plan(inputs), choice, *more)
    known = recordings.get(kind.key, NEW)
    if isinstance(known, Recording) and (outputs := known.repeated(kind)) is not None:
        return outputs
    if known is ONCE and kind.aligned and not direct.watched() and not capturing():
        with direct.there(inputs.q.device):
            again, recording = record(run, inputs, choice, more)
        remember(kind.key, recording)
        return again
    plan = make_plan(inputs)
    if known is NEW:
        remember(kind.key, ONCE)
        launches = partial(whole, inputs, plan, choice, *more)
        compiled_together(launches, inputs, plan, run, choice)
    return run(inputs, plan, choice, *more)


def found(run: Run, inputs: Inputs, choice: bool) -> Recording | None:
    """The recording of a call."""
    kind = kind_of_launches(run, inputs, choice, ())
    known = None if kind is None else recordings.get(kind.key)
    return known if isinstance(known, Recording) else None


def kind_of_launches(
    run: Run, inputs: Inputs, choice: bool, more: tuple[Tensor, ...]
) -> Kind | None:
    """The kind of a call on a GPU: with these numbers, all that its launches depend on."""
    if not inputs.q.is_cuda:
        return None
    return kind_of((*inputs[:9], *more), run, choice, *inputs[9:])


def record(
    run: Run, inputs: Inputs, choice: bool, more: tuple[Tensor, ...] = ()
) -> tuple[Outputs, Recording | None]:
    """Run a call and write it down."""
    # Each argument is a tensor of its own, whatever the caller gave twice.
    tensors: dict[str, Any] = {
        name: x.detach()
        for name, x in zip(inputs._fields, inputs, strict=True)
        if isinstance(x, Tensor)
    }
    more = tuple(x.detach() for x in more)
    plan, tape = make_plan(inputs), Tape([*tensors.values(), *more])
    watching = RecordingPlan(
        plan.call, plan.chunks, plan.sizes, plan.per_segment, plan.made, tape
    )  # fmt: skip
    with Watch(tape):
        outputs = run(inputs._replace(**tensors), watching, choice, *more)
    return outputs, tape.recording(outputs)


def marks(x: Tensor, value: float) -> bool:
    """Whether memory filled with this is marked as memory where nothing is written.

    PyTorch can be asked to do that, and does it to what a replay takes, too.
    """
    if x.is_floating_point():
        return math.isnan(value)
    return value in (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)


def is_all(x: Tensor, made: Tensor) -> bool:
    """Whether x is a tensor that was made, and not a part of it."""
    whole = x.is_contiguous() and x.nbytes == made.nbytes > 0
    return whole and x.data_ptr() == made.data_ptr()


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
        start = len(values)
        if tape.constant(x):
            values += direct.map_of(x, fetched[i]) if i in fetched else [x.data_ptr()]
            continue
        place = place_of(x, tape, places)
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
    if (i := tape.place_given(x)) is not None:
        return Place(i, x.data_ptr() - tape.given[i].data_ptr())
    made = next(i for i, y in enumerate(tape.made) if shares(x, y))
    piece, offset = places[made]
    return Place(piece, offset + x.data_ptr() - tape.made[made].data_ptr())
