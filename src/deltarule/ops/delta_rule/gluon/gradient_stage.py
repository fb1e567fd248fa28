"""When the gradients of chunks are one warp-specialised kernel, and its launch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.gluon.gradients import fused_gradients_kernel
from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.delta_rule.gluon.stage import (
    HOPPER,
    FusedLaunch,
    architecture_at,
    has_tensor_memory,
    norms_of,
    of_heads,
    of_states,
    padded,
    strides,
)
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import gradients
from deltarule.ops.delta_rule.triton.gradients import scan_back_has_values
from deltarule.ops.delta_rule.triton.plan import WHOLE, Call, Shapes, Window
from deltarule.ops.runtime.launch import Launch, multiprocessors

# Registers of a thread: on average, and of the roles of one warp; the other has the rest.
AVERAGE, OTHERS = 168, 24
# Whether D and X lie in the gradients' memory: for gated 8x4096 with 16 heads 384 MiB less, and 1 %
# more time.
LENDS = True
# Channels of tiles of keys, and as many of values.
SIZES = (64, 128)
# Pairs of a chunk and a key head for each multiprocessor.
LEAST_PAIRS = 1


def runs(call: Call) -> bool:
    """Whether it takes the gradients of this call: a function of shapes, types and the GPU."""
    q = call.inputs.q
    if (
        not stage.TRAINING
        or not q.is_cuda
        or architecture_at(q.device.index or 0) != HOPPER
        or not can(call.inputs)
    ):
        return False
    return call.plan.chunks * q.shape[2] >= LEAST_PAIRS * multiprocessors(q.device)


def can(inputs: Inputs) -> bool:
    """Whether it can on any GPU."""
    keys, values = padded(inputs)
    return (
        inputs.q.dtype == torch.bfloat16 and keys == values and keys in SIZES
        and not inputs.by_channel and inputs.n_steps == 1 and not inputs.batch_invariant
    )  # fmt: skip


def ends(call: Call) -> str:
    """Of sequences: "whole" chunks, "ragged" ones, or those of "packed" sequences."""
    if call.inputs.cu_seqlens is not None:
        return "packed"
    return "ragged" if call.inputs.q.shape[1] % CHUNK.value else "whole"


def lent(call: Call) -> tuple[str, ...]:
    """What the gradients' kernel finds where it will write them: X in dv, and D in dq and dk.

    Where value heads share a key head there is more of D than dq and dk have room for, and the scan
    back has to leave dv. Of a chunk that is not whole they have too few rows, and of a head that
    fills no tiles D has.
    """
    inputs = call.inputs
    if not LENDS or inputs.q.shape[2] != inputs.v.shape[2]:
        return ()
    found = () if inputs.beta is None else ("d_errors",)
    sizes = inputs.q.shape[3], inputs.v.shape[3]
    whole = call.once(ends) == "whole" and sizes == padded(inputs)
    return (*found, "d_states") if whole else found


def takes(call: Call, window: Window) -> bool:
    """Whether it takes this window: not of segments, whose chunks have an order of their own."""
    return bool(call.once(runs)) and (window.kind == "none" or not call.plan.per_segment)


def own_shapes(call: Call, slots: int, again: bool) -> Shapes:
    """Those of gradients.py but for what is lent; the parts of dlog_decay the kernel adds up."""
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
    """A program takes whole rows, and takes them through the norm."""
    return False


def add_gradients(call: Call, own: Mapping[str, Tensor], window: Window = WHOLE) -> None:
    """Launch the kernel on the chunks of a window."""
    launch(call, own, None if scan_back_has_values(call) else call["d_v"], window)


def launch(call: Call, own: Mapping[str, Tensor], d_v: Tensor | None, window: Window) -> None:
    """Launch `fused_gradients_kernel` on the chunks of a window; dv, too, where there is room."""
    inputs, tied = call.inputs, call.inputs.beta is not None
    batch, tokens, heads, _ = inputs.q.shape
    packed = inputs.cu_seqlens is not None
    # Packed sequences have one row of chunks.
    all_chunks = call.plan.chunks if packed else -(-tokens // CHUNK.value)
    own_chunks = window.chunks or all_chunks
    before = (window.number or 0) * own_chunks
    chunks = min(own_chunks, all_chunks - before)
    kept, decay = "states" not in own, inputs.log_decay
    errors = own.get("errors", call["errors"]) if tied else inputs.v
    x = own.get("d_errors", call["d_v"]) if tied else inputs.v
    upper = own.get("d_states", call["d_q"])
    given = (
        inputs.q, inputs.k, call["d_o"], errors, x, own.get("states", call["states"]), upper,
        call["d_k"], call["d_q"], call["d_k"], inputs.v if d_v is None else d_v, call["scalings"],
        norms_of(call), call["chunk_decay"], call["d_beta"], decay, call["d_log_decay"],
        *((inputs.cu_seqlens, inputs.sequences) if packed else (None, None)), inputs.scale,
        batch * chunks * heads, heads, chunks, before, own_chunks, all_chunks, tokens,
        *strides(decay),
    )  # fmt: skip
    programs = min(multiprocessors(inputs.q.device), batch * chunks * heads)
    choices = d_v is not None, kept, tied and "d_errors" not in own, "d_states" not in own
    call.once(gradients_launch, *choices)((programs, 1, 1), *given)


def gradients_launch(
    call: Call, values: bool, kept: bool, x_is_lent: bool, d_is_lent: bool
) -> Launch:
    """`fused_gradients_kernel` with its constants."""
    inputs, tied = call.inputs, call.inputs.beta is not None
    heads, key_size = inputs.q.shape[2:]
    value_heads, value_size = inputs.v.shape[2:]
    rows, (tile_keys, tile_values) = CHUNK.value, padded(inputs)
    of_keys = of_heads(heads, key_size, [rows, tile_keys])
    of_values = of_heads(value_heads, value_size, [rows, tile_values])
    of_chunk = value_size, [rows, tile_values]
    of_state = of_states(inputs, [tile_values, tile_keys])
    tiles = {
        "q": of_keys, "k": of_keys, "d_q": of_keys, "d_k": of_keys, "d_o": of_values,
        "d_v": of_values, "states": of_state, "errors": of_chunk if tied else of_values,
        "d_errors": of_chunk if tied and not x_is_lent else of_values,
        # Of dq or dk, 64 columns of D: of a tile with more rows those lie apart from the others.
        "upper": (heads * key_size, [rows, rows]) if d_is_lent else of_state,
        "lower": (heads * key_size, [rows, rows]),
    }  # fmt: skip
    if call.once(ends) != "whole":
        of_tokens = tiles.keys() - {"states", "upper", "lower"}
        tiles |= {name: (tiles[name][0], [1, 1, *tiles[name][1]]) for name in of_tokens}
    constants = {
        "K": tile_keys, "V": tile_values, "GROUP": value_heads // heads,
        "PER_GATE": inputs.per_gate, "TIED": tied,
        "DECAY": inputs.log_decay is not None, "UNIT": inputs.normalize_qk, "VALUES": values,
        "KEPT": kept, "X_IS_LENT": x_is_lent, "D_IS_LENT": d_is_lent,
        "TENSOR": has_tensor_memory(inputs.q.device), "ENDS": call.once(ends),
        "REGISTERS": OTHERS, "num_warps": 8, "maxnreg": AVERAGE,
    }  # fmt: skip
    return FusedLaunch(fused_gradients_kernel, constants, tiles)
