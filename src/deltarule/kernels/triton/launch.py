"""What every launch over chunks needs: plan, buffers between kernels, and how they are given."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.triton.configurations import (
    Call,
    architecture,
    call_of,
    chunk_rows,
    configuration,
    power_of_two,
)
from deltarule.kernels.triton.segment_length import chunks_per_segment

# Written out, because Triton's default follows an environment variable.
OPTIONS = {"enable_fp_fusion": True}
# The first architecture with a copy engine; before, its tiles are gathered at great cost.
COPY_ENGINE = 90


class Plan(NamedTuple):
    """Sizes of one call: chunks of CT tokens and BT rows, keys in tiles of BK channels."""

    # What its configurations depend on.
    call: Call
    chunks: int
    sizes: dict[str, int]
    # Chunks in a segment of a sequence, or 0: sequences are whole.
    per_segment: int = 0


def make_plan(inputs: Inputs) -> Plan:
    """A function of shapes and the GPU alone."""
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
    tile = configuration("next_state", call)["BV"]
    return Plan(call, chunks, sizes, chunks_per_segment(inputs, inputs.erase, size, tile))


class Scores(NamedTuple):
    """What the kernels over pairs of rows leave for those after them."""

    q: Tensor
    k: Tensor | None
    erase: Tensor | None
    write: Tensor | None
    scores: Tensor
    value_scores: Tensor | None
    corrections: Tensor | None
    from_values: Tensor | None
    scalings: Tensor | None
    chunk_decay: Tensor | None


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# Every buffer starts at a multiple of what the copy engine asks for, counted in float32.
ALIGNED = 64


def elements(shapes: Shapes) -> int:
    """How many float32 hold buffers of these shapes."""
    return sum(_room(*of) for of in shapes.values())


def views(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Cut buffers out of one float32 tensor."""
    out, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        room = _room(shape, dtype)
        part = flat[start : start + room].view(dtype)
        out[name] = part[: math.prod(shape)].view(shape)
        start += room
    return out


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    needed = -(-math.prod(shape) * dtype.itemsize // 4)
    return -(-needed // ALIGNED) * ALIGNED


def precision(dtype: torch.dtype) -> str:
    """How a product of two tiles is taken: float32 as the sum of three tf32 products."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Of batch, time and head; zeros for None."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def full_tiles(inputs: Inputs, plan: Plan, block: int) -> bool:
    """Whether every tile of the scan is full, so that a copy engine may fetch it."""
    sizes, (batch, tokens) = plan.sizes, inputs.q.shape[:2]
    return (
        architecture(inputs.q.device) >= COPY_ENGINE
        and inputs.cu_seqlens is None and batch * tokens > 0 and tokens % sizes["CT"] == 0
        and sizes["CT"] == sizes["BQ"] and sizes["CT"] * sizes["N_STEPS"] == sizes["BT"]
        and sizes["K"] == sizes["BK"] and sizes["V"] % block == 0
        and batch * tokens * sizes["N_STEPS"] < 2**31
    )  # fmt: skip


def described(x: Tensor | None, width: int, tile: list[int], wanted: bool) -> Any:
    """x as a matrix of `width` columns, in tiles that the copy engine fetches; or x itself."""
    if x is None or not wanted:
        return x
    return TensorDescriptor(x, [x.numel() // width, width], [width, 1], tile)
