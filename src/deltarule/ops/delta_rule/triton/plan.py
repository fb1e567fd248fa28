"""What every launch over chunks needs: plan, and buffers between kernels."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.tile_sizes import (
    Call,
    architecture,
    call_of,
    chunk_rows,
    configuration,
    has_own,
    plans,
    power_of_two,
)

# With an erase three passes go over a segment instead of one: fewer segments save no time.
LEAST_SEGMENTS = {"none": 2, "tied": 4, "free": 4}
LEAST_CHUNKS = 4
# Packed sequences that keep every multiprocessor busy for so long need no split.
MOST_WAVES = 4
# Channels of the largest transition matrix that fits beside the state that it acts on.
WIDEST = 128


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere 1, so that nothing is split."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def fit_at_once(inputs: Inputs, tile: int) -> bool:
    """Whether there is a multiprocessor for every `tile` rows of the state of every sequence."""
    sequences, heads, value_size, _ = inputs.state_shape
    return sequences * heads * -(-value_size // tile) <= multiprocessors(inputs.q.device)


def chunks_per_segment(inputs: Inputs, erase: str, size: int, tile: int) -> int:
    """Chunks of `size` tokens in a segment, or 0 where sequences stay whole.

    A function of shapes and the GPU alone: as many segments as give every multiprocessor a program,
    where `tile` rows of one head's state make one. Of packed sequences all but one may be short.
    """
    processors = multiprocessors(inputs.q.device)
    too_wide = erase != "none" and inputs.q.shape[3] > WIDEST
    if processors == 1 or inputs.batch_invariant or too_wide:
        return 0
    batch, tokens, heads, value_size = inputs.output_shape
    programs = max(batch * heads * -(-value_size // tile), 1)
    wanted = processors // programs
    if wanted < LEAST_SEGMENTS[erase] or programs * inputs.sequences > MOST_WAVES * processors:
        return 0
    chunks = (tokens + size - 1) // size
    length = max((chunks + wanted - 1) // wanted, LEAST_CHUNKS)
    return length if (chunks + length - 1) // length >= LEAST_SEGMENTS[erase] else 0


# The first architecture with a copy engine; before, its tiles are gathered at great cost.
COPY_ENGINE = 90
# The first whose products leave their sums in a memory of 512 columns, which is soon full.
TENSOR_MEMORY = 100
# Tokens of a chunk whose scalings, of 4 bytes each, fill the 128 that a fetched tile begins on.
LEAST_READS = 32
# Lengths of which plans are kept.
MOST_PLANS = 256

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Plan:
    """Sizes of one call: chunks of CT tokens and BT rows, keys in tiles of BK channels."""

    # What its configurations depend on.
    call: Call
    chunks: int
    sizes: dict[str, int]
    # Chunks in a segment of a sequence, or 0: sequences are whole.
    per_segment: int = 0
    made: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, make: Callable[..., Made], inputs: Inputs, *choices: Hashable) -> Made:
        """make(inputs, self, *choices) of the first call: it may follow from these alone.

        Of `inputs` it may read what `make_plan` tells calls apart by, and no values.
        """
        key = make, *choices
        if key not in self.made:
            self.made[key] = make(inputs, self, *choices)
        made: Made = self.made[key]
        return made

    def constant(self, make: Callable[..., Tensor], inputs: Inputs) -> Tensor:
        """make(inputs, self), the same in every call."""
        # What a graph captures is there when it is replayed: nobody else may read that.
        return make(inputs, self) if capturing() else self.once(make, inputs)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that a forward's kernels write, and nothing else."""
        return torch.empty(shape, dtype=dtype, device=device)


def capturing() -> bool:
    """Whether a graph takes what is launched."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def make_plan(inputs: Inputs) -> Plan:
    """A function of shapes, types and the GPU alone; on a GPU it is kept for the next call."""
    # The interpreter has no time to lose, and code that is compiled has sizes that are not numbers.
    if not inputs.q.is_cuda or type(inputs.q) is not Tensor:
        return new_plan(inputs)
    key = plan_key(inputs)
    if (plan := plans.get(key)) is None:
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plan = plans[key] = new_plan(inputs)
    return plan


def plan_key(inputs: Inputs) -> Hashable:
    """All that a plan, and what is made of it once, depends on."""
    q, packed = inputs.q, inputs.cu_seqlens
    return (
        q.shape, inputs.v.shape, q.dtype, q.device, inputs.erase, inputs.decay,
        None if packed is None else packed.shape, inputs.n_steps, inputs.normalize_qk,
        inputs.batch_invariant,
    )  # fmt: skip


def new_plan(inputs: Inputs) -> Plan:
    """The plan of a call, worked out."""
    batch, tokens, heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    call = call_of(inputs)
    rows = chunk_rows(call)
    size = rows // inputs.n_steps
    if inputs.cu_seqlens is None:
        chunks = batch * ((tokens + size - 1) // size)
    else:
        chunks = tokens // size + inputs.sequences
    sizes = {
        "H": heads, "HV": value_heads, "K": key_size, "V": value_size, "N_STEPS": inputs.n_steps,
        "CT": size, "BT": rows, "BQ": power_of_two(size),
        "BK": power_of_two(key_size),
    }  # fmt: skip
    call, per_segment = tiled(inputs, call, size)
    return Plan(call, chunks, sizes, per_segment)


def tiled(inputs: Inputs, call: Call, size: int) -> tuple[Call, int]:
    """The call, narrow where that keeps more multiprocessors busy, and the chunks in a segment.

    A function of shapes and the GPU alone. Segments are worth more than narrow tiles; tiles that
    somebody else has chosen stay as they are.
    """
    if inputs.batch_invariant or has_own(call, "next_state", "next_state_backward"):
        tile = configuration("next_state", call)["BV"]
        return call, chunks_per_segment(inputs, inputs.erase, size, tile)
    narrow = call._replace(narrow=True)
    tile, half = (configuration("next_state", x)["BV"] for x in (call, narrow))
    segment, shorter = (
        chunks_per_segment(inputs, inputs.erase, size, block) for block in (tile, half)
    )
    worth = half < tile and fit_at_once(inputs, half) and (shorter or not segment)
    return (narrow, shorter) if worth else (call, segment)


class Scores(NamedTuple):
    """What the kernels over pairs of rows leave for those after them."""

    q: Tensor
    k: Tensor | None
    erase: Tensor | None
    write: Tensor | None
    # None: the scans take them themselves.
    scores: Tensor | None
    value_scores: Tensor | None
    corrections: Tensor | None
    from_values: Tensor | None
    scalings: Tensor | None
    chunk_decay: Tensor | None


def scores_among(buffers: dict[str, Tensor]) -> Scores:
    """Those of the buffers that have their names."""
    x = buffers
    return Scores(
        x["q"], x.get("k"), x.get("erase"), x.get("write"), x.get("scores"), x.get("value_scores"),
        x.get("corrections"), x.get("from_values"), x.get("scalings"), x.get("chunk_decay"),
    )  # fmt: skip


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# Every buffer starts at a multiple of what the copy engine asks for, counted in float32.
ALIGNED = 64


class Layout(NamedTuple):
    """Where buffers lie in one flat float32 tensor."""

    elements: int
    dtypes: set[torch.dtype]
    # Name, type, shape, strides, and elements of that type before it.
    buffers: list[tuple[str, torch.dtype, tuple[int, ...], list[int], int]]


def layout(shapes: Shapes) -> Layout:
    """Place buffers of these shapes one after the other."""
    buffers, start = [], 0
    for name, (shape, dtype) in shapes.items():
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        buffers.append((name, dtype, shape, strides, start * 4 // dtype.itemsize))
        start += _room(shape, dtype)
    return Layout(start, {dtype for _, dtype in shapes.values()}, buffers)


def views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Cut the buffers out of one float32 tensor."""
    typed = {dtype: flat.view(dtype) for dtype in layout.dtypes}
    return {
        name: typed[dtype].as_strided(shape, strides, typed[dtype].storage_offset() + start)
        for name, dtype, shape, strides, start in layout.buffers
    }


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    needed = -(-math.prod(shape) * dtype.itemsize // 4)
    return -(-needed // ALIGNED) * ALIGNED


def precision(dtype: torch.dtype) -> str:
    """How a product of two tiles is taken: float32 as the sum of three tf32 products."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def inverse_precision(dtype: torch.dtype) -> str:
    """How the products of a chunk's inverse are taken: it is rounded to float16 for bfloat16 alone.

    Beside the digits of float16 inputs, as many such roundings as it has products would show.
    """
    return precision(torch.float32 if dtype == torch.float16 else dtype)


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Of batch, time and head; zeros for None."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def full_tiles(inputs: Inputs, plan: Plan, block: int) -> bool:
    """Whether every tile of the scan is full, so that a copy engine may fetch it."""
    sizes, (batch, tokens) = plan.sizes, inputs.q.shape[:2]
    return (
        architecture(inputs.q.device) >= COPY_ENGINE
        and inputs.cu_seqlens is None and batch * tokens > 0 and tokens % sizes["CT"] == 0
        and sizes["CT"] == sizes["BQ"] >= LEAST_READS
        and sizes["CT"] * sizes["N_STEPS"] == sizes["BT"]
        and sizes["K"] == sizes["BK"] and sizes["V"] % block == 0
        and batch * tokens * sizes["N_STEPS"] < 2**31
    )  # fmt: skip
