"""When gradients are one warp-specialised kernel, and the launches of the three that there are.

    fused_gradients_kernel      of chunks, with no decays or one per head
    channel_gradients_kernel    of chunks, with a decay per channel
    fused_backward_kernel       with the scan back, of no decays or one per head

The last is taken where its programs, one a head of a sequence or of a segment of one, fill the GPU:
then D and X, which the scan back and the gradients of chunks would hand on, stay on the
multiprocessor.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.gluon.backward import fused_backward_kernel
from deltarule.ops.delta_rule.gluon.channel_gradients import channel_gradients_kernel
from deltarule.ops.delta_rule.gluon.gradients import fused_gradients_kernel
from deltarule.ops.delta_rule.gluon.memory import CHUNK, Form
from deltarule.ops.delta_rule.gluon.stage import (
    CHANNEL_SIZES,
    ends,
    norms_of,
    of_heads,
    of_states,
    padded,
    up_to_ends,
)
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import gradients
from deltarule.ops.delta_rule.triton.gradients import scan_back_has_values
from deltarule.ops.delta_rule.triton.passes import piece
from deltarule.ops.delta_rule.triton.plan import MOST_WAVES, WHOLE, Call, Shapes, Window, stretches
from deltarule.ops.runtime.gluon_tiles import FusedLaunch
from deltarule.ops.runtime.launch import Launch, multiprocessors

# Registers of a thread: on average, and of the roles of one warp; the other has the rest.
AVERAGE, OTHERS, OTHERS_OF_CHANNELS = 168, 24, 40
# Channels of tiles of keys, and as many of values; those that the scan back may come with.
SIZES, WHOLE_SIZE = (64, 128), 128
# Pairs of a chunk and a key head for each multiprocessor.
LEAST_PAIRS = 1
# The part of the multiprocessors' time that programs of the whole backward must fill, by erase and
# decays: with less of it the two kernels are done first, of which one always has enough programs.
# A chunk takes 8.2 us with both, 7.1 without decays and 5.0 without an erase; unit norm adds 1.7 to
# the first.
FILLED = {
    ("tied", "head"): 0.85, ("tied", "none"): 0.75, ("none", "head"): 0.6, ("none", "none"): 0.6,
}  # fmt: skip
FILLED_WITH_NORMS = 0.95
# Chunks of a segment from which on it gains more than a forward loses by fewer segments.
LEAST_WHOLE = 64


def can(inputs: Inputs) -> bool:
    keys, values = tiles_of(inputs)
    return (
        inputs.q.dtype == torch.bfloat16 and keys == values and keys in SIZES
        and not inputs.by_channel and inputs.n_steps == 1 and not inputs.batch_invariant
    )  # fmt: skip


def halves_of(inputs: Inputs) -> int:
    """2 where tiles have half of a head's 256 keys, and its values are one or two parts.

    Such a program takes the pairs of a chunk four times, and their decays: with an erase, too, that
    is slower than Triton's kernel, but for what that has to do for norms or groups of value heads.
    """
    (heads, keys), (value_heads, values) = inputs.q.shape[2:], inputs.v.shape[2:]
    wide = keys == 2 * WHOLE_SIZE and values in (WHOLE_SIZE, keys)
    gated = inputs.beta is not None and inputs.log_decay is not None
    slower = gated and heads == value_heads and not inputs.normalize_qk
    return 2 if wide and not slower else 1


def tiles_of(inputs: Inputs) -> tuple[int, int]:
    """Keys and values of tiles."""
    return (WHOLE_SIZE, WHOLE_SIZE) if halves_of(inputs) > 1 else padded(inputs)


def can_by_channel(inputs: Inputs) -> bool:
    """Whether the second can on any GPU of Hopper."""
    return (
        inputs.q.dtype == torch.bfloat16
        and (inputs.q.shape[3], inputs.v.shape[3]) == CHANNEL_SIZES
        and inputs.q.shape[2] == inputs.v.shape[2] and inputs.decay == "channel"
        and inputs.erase != "free" and inputs.n_steps == 1 and not inputs.batch_invariant
    )  # fmt: skip


def can_whole(inputs: Inputs, cut: bool) -> bool:
    """Whether the third can on any GPU; `cut`: of segments."""
    return (
        can(inputs)
        and padded(inputs) == (WHOLE_SIZE, WHOLE_SIZE)
        and inputs.q.shape[2] == inputs.v.shape[2]
        and not (cut and inputs.cu_seqlens is not None)
    )


def keeps_tiles(inputs: Inputs, per_segment: int) -> bool:
    """Whether segments are so long that tiles of all values, which the third needs, are faster."""
    long = per_segment >= LEAST_WHOLE and inputs.erase == "tied"
    return long and can_whole(inputs, cut=True)


def runs(call: Call) -> bool:
    """Whether on Hopper the first takes this call: like the others by shapes, types and GPU."""
    return call.inputs.q.is_cuda and can(call.inputs) and has_pairs(call)


def takes_channels(call: Call) -> bool:
    return can_by_channel(call.inputs) and has_pairs(call)


def has_pairs(call: Call) -> bool:
    pairs = call.plan.chunks * call.inputs.q.shape[2]
    return pairs >= LEAST_PAIRS * multiprocessors(call.inputs.q.device)


def takes_whole(call: Call) -> bool:
    inputs, cut = call.inputs, call.plan.per_segment > 0
    if not runs(call) or not can_whole(inputs, cut):
        return False
    processors = multiprocessors(inputs.q.device)
    programs = stretches(inputs, call.plan) * inputs.q.shape[2]
    # One packed sequence may be long and the others short: only many of them even out.
    if inputs.cu_seqlens is not None and programs < MOST_WAVES * processors:
        return False
    least = FILLED[inputs.erase, inputs.decay]
    if inputs.normalize_qk and inputs.beta is not None:
        least = FILLED_WITH_NORMS
    return programs >= least * processors * -(-programs // processors)


def lends(call: Call) -> bool:
    """Whether S and E of a forward that saves lie where the gradients by q, k and v will.

    So a call that nobody repeats takes no memory for those (passes.py). As with `lent`, tiles are
    whole.
    """
    inputs = call.inputs
    sizes = inputs.q.shape[3], inputs.v.shape[3]
    whole = call.once(ends) == "whole" and sizes == padded(inputs)
    return whole and stage.pays(inputs, call.plan, True) and takes_whole(call)


def lent(call: Call) -> tuple[str, ...]:
    """What the gradients' kernel finds where it will write them: X in dv, and D in dq and dk.

    For gated 8x4096 with 16 heads that takes 384 MiB less, and 1 % more time. Where value heads
    share a key head there is more of D than dq and dk have room for, and the scan back has to leave
    dv. Of a chunk that is not whole they have too few rows, and of a head that fills no tiles D
    has.
    """
    inputs = call.inputs
    if inputs.q.shape[2] != inputs.v.shape[2] or halves_of(inputs) > 1:
        # The other half of the keys wants X, too.
        return ()
    found = () if inputs.beta is None else ("d_errors",)
    sizes = inputs.q.shape[3], inputs.v.shape[3]
    whole = call.once(ends) == "whole" and sizes == padded(inputs)
    return (*found, "d_states") if whole else found


# As triton/gradients.py has them, of the kernel of chunks.


def takes(call: Call, window: Window) -> bool:
    """Whether it takes this window: not of segments, whose chunks have an order of their own."""
    return bool(call.once(runs)) and (window.kind == "none" or not call.plan.per_segment)


def own_shapes(call: Call, slots: int, again: bool) -> Shapes:
    """Without what is lent; the parts of dlog_decay the kernel adds up."""
    shapes = gradients.own_shapes(call, slots, again)
    # The chunks of segments have an order of their own.
    spared = () if call.plan.per_segment else (*call.once(lent), "parts")
    return {name: of for name, of in shapes.items() if name not in spared}


def room_in_gradients(call: Call) -> dict[str, Tensor]:
    """Tensors of the gradients into which the scan back first stores dv or X, and D."""
    names = () if call.plan.per_segment else call.once(lent)
    room = {"d_v": call["d_v"]} if "d_errors" in names else gradients.room_in_gradients(call)
    return room | {name: call[name] for name in ("d_q", "d_k") if "d_states" in names}


def rows_are_cut(call: Call) -> bool:
    """Whether a program does not take whole rows, and them through the norm."""
    return halves_of(call.inputs) > 1


def add_gradients(call: Call, own: Mapping[str, Tensor], window: Window = WHOLE) -> None:
    """Launch the kernel on the chunks of a window; dv, too, if the scan back has left it."""
    inputs, tied = call.inputs, call.inputs.beta is not None
    all_chunks = call.plan.chunks // rows_of_chunks(inputs)
    own_chunks = window.chunks or all_chunks
    before = (window.number or 0) * own_chunks
    chunks = min(own_chunks, all_chunks - before)
    given = {
        "errors": own.get("errors", call["errors"]) if tied else inputs.v,
        "d_errors": own.get("d_errors", call["d_v"]) if tied else inputs.v,
        "states": own.get("states", call["states"]), "upper": own.get("d_states", call["d_q"]),
        "lower": call["d_k"], "d_v": inputs.v if scan_back_has_values(call) else call["d_v"],
        "before": before, "own_chunks": own_chunks, "all_chunks": all_chunks,
    }  # fmt: skip
    kept, d_is_lent = "states" not in own, "d_states" not in own
    launch = call.once(gradients_launch, kept, tied and "d_errors" not in own, d_is_lent)
    run_pairs(call, launch, chunks, given)


def run_pairs(call: Call, launch: Launch, chunks: int, own: dict[str, Any]) -> None:
    """Launch programs that share the pairs of so many chunks of every row and the key heads."""
    inputs = call.inputs
    pairs = rows_of_chunks(inputs) * chunks * call["heads"]
    own |= {"norms": norms_of(call), "pairs": pairs, "chunks": chunks}
    own["sequences"] = None if inputs.cu_seqlens is None else inputs.sequences
    call.run(launch, (min(multiprocessors(inputs.q.device), pairs), 1, 1), own)


def rows_of_chunks(inputs: Inputs) -> int:
    """Rows of the batch; packed sequences have one row of chunks."""
    return 1 if inputs.cu_seqlens is not None else inputs.q.shape[0]


def gradients_launch(call: Call, kept: bool, x_is_lent: bool, d_is_lent: bool) -> Launch:
    inputs, sizes = call.inputs, tiles_of(call.inputs)
    (heads, key_size), rows, halves = inputs.q.shape[2:], CHUNK.value, halves_of(inputs)
    parts = inputs.v.shape[3] // sizes[1] if halves > 1 else 1
    of_state, part = of_states(inputs, [*sizes[::-1]]), (heads * key_size, [rows, rows])
    # Of dq or dk, 64 columns of D: of a tile with more rows those lie apart from the others.
    tiles = {"states": of_state, "upper": part if d_is_lent else of_state, "lower": part}
    choices = {
        "GROUP": inputs.v.shape[2] // heads * parts, "PER_GATE": inputs.per_gate * parts,
        "HALVES": halves, "VALUES": not scan_back_has_values(call), "KEPT": kept,
        "X_IS_LENT": x_is_lent, "D_IS_LENT": d_is_lent,
    }  # fmt: skip
    return launch_of(fused_gradients_kernel, call, sizes, tiles, choices)


def backward(call: Call, d_end: Tensor | None) -> None:
    """Launch the whole backward, from the gradients by the states at the ends of the stretches."""
    errors = call.inputs.v if call.inputs.beta is None else call["errors"]
    own = {"errors": errors, "norms": norms_of(call), "d_final": d_end}
    programs = stretches(call.inputs, call.plan) * call["heads"]
    launch = call.once(backward_launch, bool(call["lends"]), d_end is not None)
    call.run(launch, (programs, 1, 1), own)


def backward_launch(call: Call, lends: bool, final: bool) -> Launch:
    inputs, sizes, rows = call.inputs, (WHOLE_SIZE, WHOLE_SIZE), CHUNK.value
    heads, tiles = inputs.q.shape[2], {"states": of_states(inputs, [*sizes])}
    if lends:
        tiles = dict.fromkeys(("states", "lower_states"), (heads * WHOLE_SIZE, [rows, rows]))
        tiles["errors"] = of_heads(heads, WHOLE_SIZE, [rows, WHOLE_SIZE])
    tiles |= dict.fromkeys(("scores", "corrections"), (rows, [rows, rows]))
    choices = {
        "KEYS": inputs.q.shape[3], "WIDTH": inputs.v.shape[3], "CUT": call.plan.per_segment > 0,
        "SCORES": call["scores"] is not None, "LENDS": lends, "FINAL": final,
    }  # fmt: skip
    return launch_of(fused_backward_kernel, call, sizes, tiles, choices)


def channel_gradients(call: Call) -> None:
    """Launch that with a decay per channel: every gradient but that by v."""
    inputs = call.inputs
    assert inputs.log_decay is not None
    own = {"log_decay": piece(inputs.log_decay).float()}
    if inputs.beta is None:
        own |= {"errors": inputs.v, "d_errors": inputs.v}
    chunks = call.plan.chunks // rows_of_chunks(inputs)
    run_pairs(call, call.once(channel_launch), chunks, own)


def channel_launch(call: Call) -> Launch:
    of_state = of_states(call.inputs, [*CHANNEL_SIZES[::-1]])
    tiles = dict.fromkeys(("states", "d_states"), of_state)
    return launch_of(channel_gradients_kernel, call, CHANNEL_SIZES, tiles, {})


def launch_of(
    kernel: Any, call: Call, sizes: tuple[int, int], tiles: dict[str, Any], own: dict[str, Any]
) -> Launch:
    """A kernel for tiles of so many keys and values, with `tiles` and a form of its own."""
    inputs, tied, (keys, values) = call.inputs, call.inputs.beta is not None, sizes
    (heads, key_size), (value_heads, value_size) = inputs.q.shape[2:], inputs.v.shape[2:]
    where, rows = call.once(ends), CHUNK.value
    of_keys = of_heads(heads, key_size, [rows, keys])
    of_values = of_heads(value_heads, value_size, [rows, values])
    of_chunk = value_size, [rows, values]
    form = Form(
        K=keys, V=values, TIED=tied, UNIT=inputs.normalize_qk, ENDS=where,
        DECAY=inputs.log_decay is not None and not inputs.by_channel,
        **own,
    )  # fmt: skip
    others = OTHERS_OF_CHANNELS if inputs.by_channel else OTHERS
    constants = {"FORM": form, "REGISTERS": others, "num_warps": 8, "maxnreg": AVERAGE}
    of_tokens = dict.fromkeys(("q", "k", "d_q", "d_k"), of_keys)
    of_tokens |= dict.fromkeys(("log_decay", "d_log_decay") if inputs.by_channel else (), of_keys)
    of_tokens |= {"d_o": of_values, "d_v": of_values, "errors": of_chunk if tied else of_values}
    of_tokens["d_errors"] = of_values if form.X_IS_LENT or not tied else of_chunk
    of_tokens = up_to_ends(of_tokens, where)
    of_tokens = {name: of for name, of in of_tokens.items() if name in kernel.arg_names}
    return FusedLaunch(kernel, constants, of_tokens | tiles)
