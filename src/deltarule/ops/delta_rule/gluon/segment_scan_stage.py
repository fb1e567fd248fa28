"""When a scan over chunks is one kernel with roles, and its launch: where programs are few."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES, Form
from deltarule.ops.delta_rule.gluon.segment_scan import ScanForm, segment_scan_kernel
from deltarule.ops.delta_rule.gluon.segment_scores import segment_scores_kernel
from deltarule.ops.delta_rule.gluon.segment_starts import halved_starts_kernel
from deltarule.ops.delta_rule.gluon.stage import ForwardLaunch
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.channel_stages import constant
from deltarule.ops.delta_rule.triton.plan import Call, Plan, blocks, make_plan
from deltarule.ops.runtime.chained import can_follow
from deltarule.ops.runtime.gluon_tiles import FusedLaunch
from deltarule.ops.runtime.launch import multiprocessors

# Keys and values of a head.
SIZES = (128, 128)
# Registers of a thread on average, and of the second state role.
AVERAGE, STATE = 168, 240
# Of the role that makes P.
PAIR = 128
# Chunks in shared memory, as many as there is room for; and with tiles for y', too.
SLOTS = {"ends": 4, "outputs": 3, "back": 3}
DECAYED_SLOTS = {"ends": 3, "outputs": 2, "back": 2}
# Of a plan of its own: segments, and chunks of one, at the least.
LEAST_SEGMENTS, LEAST_CHUNKS = 3, 6


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

    Triton's programs have half the rows, and with less there are no more rounds of them. A plan of
    its own is made for these; and with a decay per channel Triton's take three times as long.
    """
    processors = multiprocessors(call.inputs.q.device)
    last = (programs_of(call, goal) - 1) % processors + 1
    return places_of(call) == "later" or call.inputs.by_channel or 2 * last > processors


def can(inputs: Inputs, goal: str) -> bool:
    """Whether it can on any GPU of Hopper: all chunks are whole."""
    return (
        inputs.q.dtype == torch.bfloat16 and inputs.erase == "tied"
        # Scores with decays per channel have kernels of their own.
        and inputs.decay in (("head",) if goal == "scores" else ("head", "channel"))
        and (inputs.q.shape[3], inputs.v.shape[3]) == SIZES
        and inputs.n_steps == 1 and inputs.per_gate == 1 and not inputs.batch_invariant
        and inputs.cu_seqlens is None and inputs.q.shape[1] % CHUNK.value == 0
        and 0 < inputs.q.shape[:2].numel() < 2**31
        and not (goal == "scores" and inputs.normalize_qk)
    )  # fmt: skip


def run(
    call: Call, goal: str, start: Tensor | None, end: Tensor, o: Tensor | None = None,
    places: str = "all",
) -> None:  # fmt: skip
    """Go through all stretches whose ends are wanted, from `start` to `end` (segment_scan.py)."""
    own: dict[str, Any] = {"start": start, "o": o, "end": end}
    own["per_stretch"] = call.plan.per_segment or blocks(call.inputs.q.shape[1], CHUNK.value)
    if call.inputs.by_channel:
        own |= {"q": call["decayed_q"], "k": call["erase"]}
    else:
        own["chunk_decay"] = None
    if goal == "ends":
        own |= {"q": None, "scores": None}
    elif goal == "back":
        own["v"] = call["d_o"]
    made = goal == "outputs" and makes_pairs(call)
    own["log_scale"] = math.log2(call.inputs.scale) if made else 0.0
    grid = call.once(programs_of, goal, places), 1, 1
    given, halved = start is not None, goal == "ends" and call["halves"] is not None
    call.run(call.once(scan_launch, goal, made, places, given, halved), grid, own)


def leave_ends(call: Call, initial: Tensor | None) -> None:
    """The ends of segments, and in a call with a plan of its own the outputs of the first ones."""
    places = places_of(call)
    call.values["halves"] = halved(call)
    run(call, "ends", None if places == "later" else initial, call["ends"], None, places)
    if places == "later":
        run(call, "outputs", initial, call["ends"], call["first_o"], "first")


def halved(call: Call) -> Tensor | None:
    """Where A lies as the halves that a forward asks for that keeps nothing, else None."""
    return call["ends"].view(torch.bfloat16) if "alone" in call.plan.made else None


def places_of(call: Call) -> str:
    """Which segments have ends at once, and then outputs."""
    return "later" if "early" in call.plan.made else "all"


# Rows of the state in a program that finds starts, more where those make more programs than there
# are multiprocessors; and segments whose A are in shared memory at once.
START_ROWS, STARTS = (16, 32), 3


def starts(call: Call, boundary: Tensor | None) -> Tensor:
    """The states at the segments' starts, where ends have left halves of A (segment_starts.py)."""
    sequences, value_heads, values, keys = call.inputs.state_shape
    found = call.empty((len(call["ends"]), value_heads, values, keys))
    few, rows = START_ROWS
    if sequences * value_heads * blocks(values, few) <= multiprocessors(call.inputs.q.device):
        rows = few
    own = {"boundary": boundary, "starts": found, "segments": len(found) // sequences}
    grid = sequences * value_heads * blocks(values, rows), 1, 1
    call.run(call.once(starts_launch, rows), grid, own)
    return found


def starts_launch(call: Call, rows: int) -> FusedLaunch:
    keys, values = SIZES
    constants = {"HV": call.inputs.v.shape[2], "K": keys, "V": values, "BV": rows}
    constants |= {"SLOTS": STARTS, "num_warps": 8}
    return FusedLaunch(halved_starts_kernel, constants, {"halves": (keys, [keys, keys])})


def alone(call: Call) -> Call:
    """A call that keeps nothing: with a plan of its own, where it takes this scan.

    Without decays it does so as if they were 0, where the plan's segments are its own.
    """
    own, plain = call, call.inputs.decay == "none"
    if plain:
        # Of the shape and kind that decays of 0 will have.
        if not can(call.inputs._replace(log_decay=call.inputs.beta), "scores"):
            return call
        own = undecayed(call)
    if not takes(own, "outputs"):
        return call
    plan = own.once(plan_alone, scored := takes(own, "scores"))
    if plain and not (scored and "early" in plan.made):
        return call
    return Call(own.inputs, plan, call.given)


def undecayed(call: Call) -> Call:
    """A call without decays, as one whose decays are 0."""
    inputs, q = call.inputs, call.inputs.q
    decays = constant(q, no_decay, q.device).expand(inputs.v.shape[:3])
    inputs = inputs._replace(log_decay=decays)
    return Call(inputs, make_plan(inputs), call.given)


def no_decay(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.float32, device=device)


def plan_alone(call: Call, scored: bool) -> Plan:
    made: dict[Hashable, Any] = {"alone": True}
    plan = call.plan
    if size := segments_alone(call.inputs, plan):
        plan = replace(plan, tile_key=plan.tile_key._replace(narrow=True), per_segment=size)
        made["early"] = True
    if scored and plan.tile_key.narrow:
        # Beside a narrow tile there is room to make P, which nobody else wants.
        made["makes_pairs"] = True
    return replace(plan, made=made)


def segments_alone(inputs: Inputs, plan: Plan) -> int:
    """Chunks in a segment where a forward that keeps nothing has others than a plan, or 0.

    The outputs of first segments are made beside the ends of the others, the last of which has
    none: with m segments of narrow tiles there are m - 1 programs a tile at once, twice. Where a
    usual plan has narrow tiles and segments as short, it would only be one more launch.
    """
    if not can(inputs, "outputs"):
        return 0
    batch, tokens, value_heads, values = inputs.v.shape
    chunks, tiles = tokens // CHUNK.value, batch * value_heads * (values // VALUES.value)
    segments = multiprocessors(inputs.q.device) // tiles + 1
    size, narrow = blocks(chunks, segments), plan.tile_key.narrow
    few = segments < LEAST_SEGMENTS or chunks < LEAST_CHUNKS * segments
    return 0 if few or (narrow and 0 < plan.per_segment <= size) else size


def segments_of(call: Call) -> int:
    """Segments of a sequence, or one."""
    chunks = call.inputs.v.shape[1] // CHUNK.value
    return blocks(chunks, call.plan.per_segment or chunks)


def programs_of(call: Call, goal: str, places: str = "all") -> int:
    batch, _, value_heads, values = call.inputs.v.shape
    every = segments_of(call)
    count = {"ends": 2 * every - 3, "outputs": every, "back": every - 1}[goal]
    count = {"all": count, "later": count - 1, "first": 1}[places]
    return count * batch * value_heads * (values // VALUES.value // parts(call, goal))


# Of scores: programs of a multiprocessor, registers of a thread on average, and of warps beside.
SCORE_PROGRAMS, SCORE_AVERAGE, SCORE_OTHERS = 3, 80, 32
# The same where P is not among them.
ALONE_PROGRAMS, ALONE_AVERAGE = 4, 64


def scores(call: Call) -> None:
    """P, N and the scalings of all chunks (segment_scores.py)."""
    batch, tokens, value_heads, _ = call.inputs.v.shape
    made, chunks = makes_pairs(call), tokens // CHUNK.value
    programs = ALONE_PROGRAMS if made else SCORE_PROGRAMS
    programs *= multiprocessors(call.inputs.q.device)
    per_program = blocks(batch * chunks * value_heads, programs)
    own: dict[str, Any] = {"per_program": per_program, "log_scale": math.log2(call.inputs.scale)}
    if made:
        own["q"] = None
    grid = batch * blocks(chunks, per_program) * value_heads, 1, 1
    call.run(call.once(scores_launch, made), grid, own)


def makes_pairs(call: Call) -> bool:
    """Whether the scan makes P, and not the scores."""
    return "makes_pairs" in call.plan.made


def scores_launch(call: Call, made: bool) -> FusedLaunch:
    keys, rows = SIZES[0], CHUNK.value
    of_keys, square = (call.inputs.q.shape[2] * keys, [rows, keys]), (rows, [rows, rows])
    tiles = {"q": of_keys, "k": of_keys, "scores": square, "corrections": square}
    form = Form(
        TIED=True, DECAY=True, UNIT=False, ENDS="whole", PARTS=0, SAVE=True, SCORES=not made
    )  # fmt: skip
    constants = {"FORM": form, "REGISTERS": SCORE_OTHERS, "num_warps": 4}
    constants["maxnreg"] = ALONE_AVERAGE if made else SCORE_AVERAGE
    return FusedLaunch(segment_scores_kernel, constants, tiles)


def parts(call: Call, goal: str) -> int:
    """State roles of a program: one where outputs are of so few programs that tiles are narrow."""
    inputs, tiles = call.inputs, SIZES[1] // VALUES.value
    narrow = call.plan.tile_key.narrow
    if inputs.by_channel and not narrow:
        # Triton has no narrow tiles for these, and a plan never asks for them.
        programs = segments_of(call) * inputs.v.shape[0] * inputs.v.shape[2] * tiles
        narrow = programs <= multiprocessors(inputs.q.device)
    return 1 if goal == "outputs" and narrow else tiles


def scan_launch(
    call: Call, goal: str, made: bool, places: str, given: bool, halved: bool
) -> FusedLaunch:
    inputs, rows, (keys, values) = call.inputs, CHUNK.value, SIZES
    decayed, square, pair = inputs.by_channel, (rows, [rows, rows]), (rows, [2, rows])
    of_keys = (1 if decayed else inputs.q.shape[2]) * keys, [rows, keys]
    of_values = inputs.v.shape[2] * values, [rows, VALUES.value]
    tiles = {
        "q": of_keys, "k": of_keys, "write": of_keys, "v": of_values, "o": of_values,
        "scores": square, "corrections": square, "scalings": pair, "chunk_decay": pair,
    }  # fmt: skip
    follows = can_follow(inputs.q.device) and places != "all"
    form = ScanForm(
        K=keys, V=values, PARTS=call.once(parts, goal),
        SLOTS=(DECAYED_SLOTS if decayed else SLOTS)[goal], GOAL=goal, PLACES=places, GIVEN=given,
        DECAYED=decayed, MAKES=made, HALVED=halved, FOLLOWS=follows,
    )  # fmt: skip
    constants = {
        "FORM": form, "REGISTERS": PAIR if made else STATE, "num_warps": 4, "maxnreg": AVERAGE,
        "launch_pdl": follows and places == "first",
    }  # fmt: skip
    return ForwardLaunch(segment_scan_kernel, constants, tiles)
