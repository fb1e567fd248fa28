"""What the kernels of one call are launched with: sizes, buffers, and values by their names."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import tile_sizes
from deltarule.ops.delta_rule.triton.tile_sizes import TileKey, architecture
from deltarule.ops.delta_rule.triton.tiles import Sizes
from deltarule.ops.dispatch import plans, remember
from deltarule.ops.runtime.launch import CHOICES, Grid, Launch, multiprocessors, parameters
from deltarule.ops.runtime.tensor_maps import Tiles

# With an erase three passes go over a segment instead of one: fewer segments save no time.
LEAST_SEGMENTS = {"none": 2, "tied": 4, "free": 4}
LEAST_CHUNKS = 4
# Packed sequences that make so many waves of programs need no split.
MOST_WAVES = 4
# Channels of the largest transition matrix that fits beside the state that it acts on.
WIDEST = 128
# By bytes of a number: chunks of a segment beyond which narrow tiles lose more than they win.
LONGEST = {2: math.inf, 4: 16}
# The first architecture with a copy engine; before, its tiles are gathered at great cost.
COPY_ENGINE = 90
# The first whose products leave their sums in a memory of 512 columns, which is soon full.
TENSOR_MEMORY = 100
# Tokens of a chunk whose row factors, of 4 bytes each, fill the 128 that a fetched tile begins on.
LEAST_READS = 32
# What the kernels over pairs of rows leave for those after them, each where it is needed. Without
# scores the scans take them themselves; decayed q and k have the decays of their channels.
NO_BUFFERS: dict[str, Tensor | None] = dict.fromkeys(
    ("scores", "value_scores", "corrections", "from_values", "scalings", "chunk_decay",
     "decayed_q", "decayed_k", "erase", "write", "sums", "fast_rows")
)  # fmt: skip
# From a kernel's constants: which arguments the copy engine fetches, and in which tiles.
Fetches = Callable[[Mapping[str, Any]], Tiles]
# The bar of channel_decay.py: what a block may decay to, as a power of 2.
BARS = {torch.float32: 12.0, torch.float16: 115.0, torch.bfloat16: 115.0}


@dataclass(frozen=True, eq=False)
class Plan:
    """Sizes of one call: chunks of CT tokens and BT rows, keys in tiles of BK channels."""

    # What its configurations depend on.
    tile_key: TileKey
    chunks: int
    sizes: dict[str, int]
    # Chunks in a segment of a sequence, or 0: sequences are whole.
    per_segment: int = 0
    # What follows from the plan and the kind of inputs alone: configurations, launches, layouts.
    made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def split(self) -> str:
        """What kernels go through: whole sequences, or segments from the states at their starts."""
        return "starts" if self.per_segment else "none"


def make_plan(inputs: Inputs) -> Plan:
    """A function of shapes, types and the GPU alone; on a GPU it is kept for the next call."""
    # The interpreter gains nothing by it, and compiled code has sizes that are not plain numbers.
    if not inputs.q.is_cuda or type(inputs.q) is not Tensor:
        return new_plan(inputs)
    key = plan_key(inputs)
    if (plan := plans.get(key)) is None:
        remember(plans, key, plan := new_plan(inputs))
    return plan


def plan_key(inputs: Inputs) -> Hashable:
    """All that a plan, and what is made of it once, depends on."""
    q, packed = inputs.q, inputs.cu_seqlens
    shapes = q.shape, inputs.v.shape, None if packed is None else packed.shape
    rule = inputs.erase, inputs.decay, inputs.n_steps, inputs.normalize_qk, inputs.per_gate
    return *shapes, q.dtype, q.device, *rule, inputs.batch_invariant


def new_plan(inputs: Inputs) -> Plan:
    heads, key_size, value_heads, value_size = *inputs.q.shape[2:], *inputs.v.shape[2:]
    key, per_segment = tile_sizes.tile_key(inputs), 0
    rows = tile_sizes.chunk_rows(key)
    size = rows // inputs.n_steps
    sizes = {"H": heads, "HV": value_heads, "K": key_size, "V": value_size, "CT": size, "BT": rows}
    reads, keys = tile_sizes.power_of_two(size), tile_sizes.power_of_two(key_size)
    sizes |= {"N_STEPS": inputs.n_steps, "BQ": reads, "BK": keys}
    if not inputs.batch_invariant:
        # Narrow tiles where those keep more multiprocessors busy; segments are worth more.
        narrow = key._replace(narrow=True)
        tile, half = (tile_sizes.configuration("next_state", x)["BV"] for x in (key, narrow))
        per_segment, shorter = (chunks_per_segment(inputs, size, x) for x in (tile, half))
        programs = inputs.sequences * value_heads * blocks(value_size, half)
        worth = half < tile and programs <= multiprocessors(inputs.q.device)
        worth = worth and (shorter > 0 or not per_segment) and shorter <= LONGEST[key.element_bytes]
        if worth and on_hopper(inputs.q):
            from deltarule.ops.delta_rule.gluon.gradient_stage import keeps_tiles

            worth = not keeps_tiles(inputs, per_segment)
        key, per_segment = (narrow, shorter) if worth else (key, per_segment)
    return Plan(key, numbers_of(inputs, size), sizes, per_segment)


def kernel_key(inputs: Inputs, plan: Plan) -> Hashable:
    """What kernels are compiled for (long segments have some more); rare ones compile later."""
    _, tokens, heads, key_size = inputs.q.shape
    sizes = heads, key_size, *inputs.v.shape[2:], inputs.n_steps
    rule = inputs.erase, inputs.decay, inputs.normalize_qk
    given = inputs.cu_seqlens is None, inputs.initial_state is None
    own = plan.tile_key, plan.per_segment.bit_length(), tokens % plan.sizes["CT"] == 0
    return inputs.q.device, inputs.q.dtype, *sizes, *rule, *given, *own


def numbers_of(inputs: Inputs, size: int) -> int:
    """Chunks of so many tokens; of packed sequences, numbers that are given to their chunks."""
    batch, tokens = inputs.q.shape[:2]
    if inputs.cu_seqlens is None:
        return batch * blocks(tokens, size)
    return tokens // size + inputs.sequences


def stretches(inputs: Inputs, plan: Plan) -> int:
    """Sequences, or numbers for the segments that they are split into, as there are for chunks."""
    size = plan.per_segment * plan.sizes["CT"]
    return numbers_of(inputs, size) if size else inputs.sequences


def chunks_per_segment(inputs: Inputs, size: int, tile: int) -> int:
    """Chunks of `size` tokens in a segment, or 0 where sequences stay whole.

    A function of shapes and the GPU alone: as many segments as give every multiprocessor a program,
    where `tile` rows of one head's state make one. All packed sequences but one may be short.
    """
    processors, erase = multiprocessors(inputs.q.device), inputs.erase
    if processors == 1 or (erase != "none" and inputs.q.shape[3] > WIDEST):
        return 0
    batch, tokens, heads, value_size = inputs.output_shape
    programs = max(batch * heads * blocks(value_size, tile), 1)
    wanted = processors // programs
    if wanted < LEAST_SEGMENTS[erase] or programs * inputs.sequences > MOST_WAVES * processors:
        return 0
    chunks = blocks(tokens, size)
    length = max(blocks(chunks, wanted), LEAST_CHUNKS)
    return length if blocks(chunks, length) >= LEAST_SEGMENTS[erase] else 0


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# Numbers of float32 to which buffers are aligned, as the copy engine needs.
ALIGNED = 64


class Layout(NamedTuple):
    """Where buffers lie one after the other in one flat float32 tensor."""

    elements: int
    dtypes: set[torch.dtype]
    # Name, type, shape, strides, and elements of that type before it.
    buffers: list[tuple[str, torch.dtype, tuple[int, ...], list[int], int]]

    @classmethod
    def of(cls, shapes: Shapes) -> "Layout":
        buffers, start = [], 0
        for name, (shape, dtype) in shapes.items():
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            buffers.append((name, dtype, shape, strides, start * 4 // dtype.itemsize))
            start += blocks(math.prod(shape) * dtype.itemsize, 4 * ALIGNED) * ALIGNED
        return cls(start, {dtype for _, dtype in shapes.values()}, buffers)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        typed = {dtype: flat.view(dtype) for dtype in self.dtypes}
        return {
            name: typed[dtype].as_strided(shape, strides, typed[dtype].storage_offset() + start)
            for name, dtype, shape, strides, start in self.buffers
        }


def blocks(length: int, size: int) -> int:
    """How many blocks of a size cover a length; `triton.cdiv` takes microseconds."""
    return -(-length // size)


def precision(dtype: torch.dtype, inverse: bool = False) -> str:
    """How a product of two tiles is taken: float32 as the sum of three tf32 products.

    A chunk's inverse is rounded to float16 for bfloat16 alone: beside the digits of float16 inputs,
    as many such roundings as it has products would show.
    """
    exact = dtype == torch.float32 or (inverse and dtype == torch.float16)
    return "tf32x3" if exact else "tf32"


def arguments(inputs: Inputs, plan: Plan) -> dict[str, Any]:
    """What kernels are given of a call, by the names of their parameters."""
    log_decay, key_size = inputs.log_decay, plan.sizes["K"]
    if inputs.by_channel and log_decay is not None and log_decay.ndim == 3:
        # One number of a head is repeated in place.
        log_decay = log_decay.unsqueeze(-1).expand(*log_decay.shape, key_size)
    given = inputs._replace(log_decay=log_decay)._asdict()
    given |= {"T": inputs.q.shape[1], "N": inputs.sequences, "heads": plan.sizes["H"]}
    given |= {"chunks": plan.chunks, "per_segment": plan.per_segment}
    given["value_heads"] = plan.sizes["HV"]
    names = "s_beta_b", "s_beta_t", "s_beta_h", "s_decay_b", "s_decay_t", "s_decay_h", "s_decay_k"
    beta = (0, 0, 0) if inputs.beta is None else inputs.beta.stride()
    decay = (0, 0, 0, 0) if log_decay is None else (*log_decay.stride(), 0)
    return given | dict(zip(names, (*beta, *decay), strict=False))


class Window(NamedTuple):
    """Chunks [number, number + 1) * chunks of every stretch, of the row ("row") or all ("none")."""

    kind: str
    number: int | None
    chunks: int | None

    def constants(self) -> dict[str, Any]:
        return {"WINDOW": self.kind, "window": self.number, "per_window": self.chunks}


WHOLE = Window("none", None, None)


class Call:
    """One pass through a call's kernels: its plan, its inputs, and one namespace of all values.

    Tensors, numbers and constants have the names of the kernels' parameters, by which a launch
    finds them. What a stage leaves for those after it joins the namespace. What is returned has the
    shapes of the call as it was `given`.
    """

    def __init__(self, inputs: Inputs, plan: Plan, given: Inputs | None = None) -> None:
        self.inputs, self.plan, self.given = inputs, plan, inputs if given is None else given
        self.values: dict[str, Any] = {**NO_BUFFERS, **arguments(inputs, plan)}

    def __getitem__(self, name: str) -> Any:
        """A value, or None where no stage has left one."""
        return self.values.get(name)

    def once(self, make: Callable[..., Any], *choices: Hashable) -> Any:
        """make(self, *choices) of the first call of this plan.

        It may read what `plan_key` tells calls apart by, and no values.
        """
        key = make, *choices
        if key not in self.plan.made:
            self.plan.made[key] = make(self, *choices)
        return self.plan.made[key]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.inputs.q.device)

    def room(self, shapes: Callable[..., Shapes], *choices: Hashable) -> dict[str, Tensor]:
        return {name: self.empty(*of) for name, of in self.once(shapes, *choices).items()}

    def launch(
        self, kernel: Any, grid: Grid, own: Mapping[str, Any], fetched: Fetches | None = None
    ) -> None:
        """Run a kernel on the values that its parameters name; those in `own` go first.

        Where the constant TMA is set, `fetched` tells from the constants which arguments the copy
        engine fetches, and in which tiles.
        """
        asked, known = parameters(kernel, Sizes._fields)
        key = (id(kernel), *[(name, x) for name, x in own.items() if name in known])
        if (found := self.plan.made.get(key)) is None:
            all_of_it = {**self.once(constants), **self.values, **own}
            all_of_it["S"] = Sizes(*map(all_of_it.get, Sizes._fields))
            if missing := {*asked, *known} - {*all_of_it, *CHOICES, *Sizes._fields}:
                raise TypeError(f"a kernel asks for {sorted(missing)}, which the call has not")
            names = *kernel.arg_names[len(asked) :], *CHOICES
            fixed = {name: all_of_it[name] for name in names if name in all_of_it}
            tiles = fetched(all_of_it) if fetched and all_of_it["TMA"] else None
            found = self.plan.made[key] = Launch(kernel, fixed, tiles)
        self.run(found, grid, own)

    def run(self, launch: Launch, grid: Grid, own: Mapping[str, Any]) -> None:
        """Launch on the values that the kernel's parameters name; those in `own` go first."""
        asked, values = parameters(launch.kernel)[0], self.values
        launch(grid, *[own[name] if name in own else values.get(name) for name in asked])


def constants(call: Call) -> dict[str, Any]:
    """What kernels are compiled for: sizes and choices; a launch may have others of its own."""
    inputs, plan = call.inputs, call.plan
    decays, decayed, dtype = inputs.log_decay is not None, inputs.by_channel, inputs.q.dtype
    return {
        **plan.sizes, "PER_GATE": inputs.per_gate, "HAS_DECAY": decays,
        "ERASE": inputs.erase, "TIED": inputs.beta is not None,
        # Decayed rows hold a head's decay channel by channel, too.
        "DECAY": "channel" if decays and decayed else inputs.decay,
        "DECAYED": decayed, "SCALED": not decayed and (decays or inputs.normalize_qk),
        "UNIT_NORM": inputs.normalize_qk, "PACKED": inputs.cu_seqlens is not None,
        "PRECISION": precision(dtype), "MERGE": precision(dtype, inverse=True), "BAR": BARS[dtype],
        "EXACT": dtype == torch.float32,
        "WINDOW": "none", "window": None, "per_window": None, "OPEN": False,
    }  # fmt: skip


def on_hopper(x: Tensor) -> bool:
    """Whether x lies on a GPU with a copy engine and without tensor memory."""
    return architecture(x.device) in range(COPY_ENGINE, TENSOR_MEMORY)


def gradients_of(call: Call, window: Window = WHOLE) -> Any:
    """The module for the gradients of a window: gradients.py, or one kernel where it is faster."""
    from deltarule.ops.delta_rule.triton import gradients

    if on_hopper(call.inputs.q):
        from deltarule.ops.delta_rule.gluon import gradient_stage

        return gradient_stage if gradient_stage.takes(call, window) else gradients
    return gradients


def full_tiles(inputs: Inputs, plan: Plan, block: int) -> bool:
    """Whether every tile of the scan is full, so that a copy engine may fetch it."""
    sizes, (batch, tokens) = plan.sizes, inputs.q.shape[:2]
    rows = tokens * sizes["N_STEPS"]
    chunks = inputs.cu_seqlens is None and tokens % sizes["CT"] == 0
    reads = sizes["CT"] == sizes["BQ"] >= LEAST_READS
    writes = sizes["CT"] * sizes["N_STEPS"] == sizes["BT"] and 0 < batch * rows < 2**31
    channels = sizes["K"] == sizes["BK"] and sizes["V"] % block == 0
    fetches = architecture(inputs.q.device) >= COPY_ENGINE
    return fetches and chunks and reads and writes and channels
