"""When a scan over chunks is one kernel with roles, and its launch: where programs are few."""

import math
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES
from deltarule.ops.delta_rule.gluon.segment_scan import segment_scan_kernel
from deltarule.ops.delta_rule.gluon.segment_scores import segment_scores_kernel
from deltarule.ops.delta_rule.gluon.stage import ForwardLaunch
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Call, blocks
from deltarule.ops.runtime.gluon_tiles import FusedLaunch
from deltarule.ops.runtime.launch import multiprocessors

# Keys and values of a head.
SIZES = (128, 128)
# Registers of a thread on average, and of the second state role.
AVERAGE, STATE = 168, 240
# Chunks in shared memory, as many as there is room for.
SLOTS = {"ends": 4, "outputs": 3, "back": 3}


def takes(call: Call, goal: str) -> bool:
    """Whether it takes this scan on Hopper. A plan does not know scales, nor who comes to meet."""
    known = call["join"] is None and not (goal == "scores" and call.inputs.scale <= 0)
    return known and call.once(suits, goal)


def suits(call: Call, goal: str) -> bool:
    """What shapes, types and the GPU tell of it."""
    able = call.inputs.q.is_cuda and can(call.inputs, goal)
    return able and (goal in ("outputs", "scores") or fills(call, goal))


def fills(call: Call, goal: str) -> bool:
    """Whether the last round of programs fills half of the multiprocessors or more.

    Triton's programs have half the rows, and with less there are no more rounds of them.
    """
    processors = multiprocessors(call.inputs.q.device)
    return 2 * ((programs_of(call, goal) - 1) % processors + 1) > processors


def can(inputs: Inputs, goal: str) -> bool:
    """Whether it can on any GPU of Hopper: all chunks are whole."""
    return (
        inputs.q.dtype == torch.bfloat16 and (inputs.erase, inputs.decay) == ("tied", "head")
        and (inputs.q.shape[3], inputs.v.shape[3]) == SIZES
        and inputs.n_steps == 1 and inputs.per_gate == 1 and not inputs.batch_invariant
        and inputs.cu_seqlens is None and inputs.q.shape[1] % CHUNK.value == 0
        and 0 < inputs.q.shape[:2].numel() < 2**31
        and not (goal == "scores" and inputs.normalize_qk)
    )  # fmt: skip


def run(call: Call, goal: str, start: Tensor | None, end: Tensor, o: Tensor | None = None) -> None:
    """Go through all stretches whose ends are wanted, from `start` to `end` (segment_scan.py)."""
    own: dict[str, Any] = {"start": start, "o": o, "end": end}
    own["per_stretch"] = call.plan.per_segment or blocks(call.inputs.q.shape[1], CHUNK.value)
    if goal == "ends":
        own |= {"q": None, "scores": None}
    elif goal == "back":
        own["v"] = call["d_o"]
    call.run(call.once(scan_launch, goal), (call.once(programs_of, goal), 1, 1), own)


def programs_of(call: Call, goal: str) -> int:
    batch, tokens, value_heads, values = call.inputs.v.shape
    chunks = tokens // CHUNK.value
    stretches = blocks(chunks, call.plan.per_segment or chunks)
    count = {"ends": 2 * stretches - 3, "outputs": stretches, "back": stretches - 1}[goal]
    return count * batch * value_heads * (values // VALUES.value // parts(call, goal))


# Of scores: programs of a multiprocessor, registers of a thread on average, and of warps beside.
SCORE_PROGRAMS, SCORE_AVERAGE, SCORE_OTHERS = 3, 80, 32


def scores(call: Call) -> None:
    """P, N and the scalings of all chunks (segment_scores.py)."""
    batch, tokens, value_heads, _ = call.inputs.v.shape
    chunks, programs = tokens // CHUNK.value, SCORE_PROGRAMS * multiprocessors(call.inputs.q.device)
    per_program = blocks(batch * chunks * value_heads, programs)
    own = {"per_program": per_program, "log_scale": math.log2(call.inputs.scale)}
    grid = batch * blocks(chunks, per_program) * value_heads, 1, 1
    call.run(call.once(scores_launch), grid, own)


def scores_launch(call: Call) -> FusedLaunch:
    keys, rows = SIZES[0], CHUNK.value
    of_keys, square = (call.inputs.q.shape[2] * keys, [rows, keys]), (rows, [rows, rows])
    tiles = {"q": of_keys, "k": of_keys, "scores": square, "corrections": square}
    constants = {"K": keys, "REGISTERS": SCORE_OTHERS, "num_warps": 4, "maxnreg": SCORE_AVERAGE}
    return FusedLaunch(segment_scores_kernel, constants, tiles)


def parts(call: Call, goal: str) -> int:
    """State roles of a program: one where outputs are of so few programs that tiles are narrow."""
    return 1 if goal == "outputs" and call.plan.tile_key.narrow else SIZES[1] // VALUES.value


def scan_launch(call: Call, goal: str) -> FusedLaunch:
    inputs, rows, (keys, values) = call.inputs, CHUNK.value, SIZES
    of_keys, square = (inputs.q.shape[2] * keys, [rows, keys]), (rows, [rows, rows])
    of_values = inputs.v.shape[2] * values, [rows, VALUES.value]
    tiles = {"k": of_keys, "v": of_values, "corrections": square, "scalings": (rows, [2, rows])}
    if goal != "ends":
        tiles |= {"q": of_keys, "scores": square}
    if goal == "outputs":
        tiles["o"] = of_values
    constants = {
        "K": keys, "V": values, "PARTS": call.once(parts, goal), "SLOTS": SLOTS[goal],
        "GOAL": goal, "REGISTERS": STATE, "num_warps": 4, "maxnreg": AVERAGE,
    }  # fmt: skip
    return ForwardLaunch(segment_scan_kernel, constants, tiles)
