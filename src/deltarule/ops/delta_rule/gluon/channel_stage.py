"""When the fused forward with a decay per channel runs, and its launch.

As in stage.py: it can run where `why_not_form` finds nothing against it, and impl="gluon" asks no
more.
"""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon.channel_forward import channel_forward_kernel
from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES, straight
from deltarule.ops.delta_rule.gluon.stage import norms_of, strides, up_to_ends
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Call
from deltarule.ops.runtime.gluon_tiles import FusedLaunch
from deltarule.ops.runtime.launch import ALIGNED, Launch

SIZES = 128, 128
# Chunks of q, k and v in shared memory, and registers of a thread: on average, of the second state
# role (the first has what the others leave), of the score role, and of those that move tiles.
SLOTS = 2
AVERAGE, STATE, SCORE, OTHERS = 128, 192, 104, 24

# What is saved for a backward, by the copy engine and otherwise.
MOVED = "errors", "scores", "corrections"
KEPT = "states", "decayed_q", "erase", "write", "scalings", "chunk_decay", "fast_rows"


def why_not_form(inputs: Inputs) -> str | None:
    """What it cannot do on any GPU, of what stage.py does not refuse."""
    sizes = inputs.q.shape[3], inputs.v.shape[3]
    if inputs.erase == "free":
        return "the fused kernel has erase none or tied, got a free one"
    if sizes != SIZES:
        return f"the fused kernel of decays per channel has (K, V) = {SIZES}, got {sizes}"
    if inputs.q.dtype != torch.bfloat16:
        return (
            "the fused kernel of decays per channel needs the range of bfloat16, got "
            f"{inputs.q.dtype}"
        )
    return None


def channel_launch(call: Call, save: bool) -> Launch:
    """`channel_forward_kernel` with its constants."""
    inputs = call.inputs
    _, tokens, heads, key_size = inputs.q.shape
    value_heads, value_size = inputs.v.shape[2:]
    packed = inputs.cu_seqlens is not None
    rows, keys, values = CHUNK.value, heads * key_size, value_heads * value_size
    tiles = {
        "q": (keys, [rows, key_size]), "k": (keys, [rows, key_size]),
        "v": (values, [rows, VALUES.value]), "o": (values, [rows, VALUES.value]),
        "decays": (value_heads * key_size, [rows, key_size]),
    }  # fmt: skip
    ends = "ragged" if packed or tokens % rows else "whole"
    constants = {
        "K": key_size, "V": value_size, "SLOTS": SLOTS, "TIED": inputs.beta is not None,
        "UNIT": inputs.normalize_qk, "PACKED": packed, "SAVE": save, "ENDS": ends,
        "STATE_REGISTERS": STATE, "SCORE_REGISTERS": SCORE, "REGISTERS": OTHERS,
        "num_warps": 4, "maxnreg": AVERAGE,
    }  # fmt: skip
    tiles = up_to_ends(tiles, ends)
    if save:
        tiles["scores"] = rows, [rows * VALUES.value // value_size, rows]
        if inputs.beta is not None:
            tiles["errors"] = value_size, [rows, VALUES.value]
            tiles["corrections"] = rows, [rows, rows]
    return ChannelLaunch(channel_forward_kernel, constants, tiles)


class ChannelLaunch(FusedLaunch):
    """Rows of log decays lie one after the other."""

    def layout(self, name: str, rank: int, bits: int) -> Any:
        return straight(rank, bits) if name == "decays" else super().layout(name, rank, bits)


def forward(call: Call, save: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs and the final state; every tensor but beta and the decays lies in one piece.

    `save`: what a backward asks for is left where the call has room.
    """
    inputs, decays = call.inputs, call.inputs.log_decay
    assert decays is not None
    q, k, v, value_heads = inputs.q, inputs.k, inputs.v, inputs.v.shape[2]
    norms = norms_of(call)
    o = call.empty(inputs.output_shape, v.dtype)
    final = call.empty(inputs.state_shape)
    decays = in_rows(decays)
    moved, kept = ([call[name] if save else None for name in names] for names in (MOVED, KEPT))
    given = (
        q, k, v, o, decays, *moved, q, k, *kept, decays, inputs.beta, norms, inputs.cu_seqlens,
        inputs.initial_state, final, inputs.scale, *q.shape[1:3], value_heads,
        *strides(inputs.beta),
    )  # fmt: skip
    call.once(channel_launch, save)((inputs.sequences * value_heads, 1, 1), *given)
    return o, final


def in_rows(decays: Tensor) -> Tensor:
    """Log decays as the kernel copies them: in one piece, in float32."""
    if decays.is_contiguous() and decays.data_ptr() % ALIGNED == 0:
        return decays.float()
    return decays.clone(memory_format=torch.contiguous_format).float()
