"""When the scan back and the gradients are one kernel, and its launch.

It is taken where its programs, one a head of a sequence or of a segment of one, fill the GPU: then
D and X, which the scan back and the gradients of chunks would hand on, stay on the multiprocessor.
"""

import torch

from deltarule.ops.delta_rule.gluon import gradient_stage
from deltarule.ops.delta_rule.gluon.backward import fused_backward_kernel
from deltarule.ops.delta_rule.gluon.gradient_stage import OTHERS, ends
from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.delta_rule.gluon.stage import (
    FusedLaunch,
    norms_of,
    of_heads,
    of_states,
    padded,
    strides,
)
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import MOST_WAVES, Call, stretches
from deltarule.ops.runtime.launch import Launch, multiprocessors

# Whether calls take it where it pays. Set it before the first call: plans keep what was chosen.
CHOSEN = True
# Key channels of tiles, and as many values.
SIZE = 128
# Registers of a thread, on average; the roles of one warp have OTHERS.
AVERAGE = 168
# The part of the multiprocessors' time that programs must fill, by erase and decays: with less of
# it the two kernels are done first, of which one always has enough programs. A chunk takes 8.2 us
# with both, 7.1 without decays and 5.0 without an erase; unit norm adds 1.7 to the first.
FILLED = {
    ("tied", "head"): 0.85, ("tied", "none"): 0.75, ("none", "head"): 0.6, ("none", "none"): 0.6,
}  # fmt: skip
FILLED_WITH_NORMS = 0.95
# Chunks of a segment from which on it gains more than a forward loses by fewer segments.
LEAST_WHOLE = 64


def takes(call: Call) -> bool:
    """Whether it takes the backward of this call: a function of shapes, types and the GPU."""
    inputs, cut = call.inputs, call.plan.per_segment > 0
    if not CHOSEN or not gradient_stage.runs(call) or not can(inputs, cut):
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


def gains_by_wide_tiles(inputs: Inputs, per_segment: int) -> bool:
    """Whether long segments in tiles of all values, which it needs, are faster than short ones."""
    return per_segment >= LEAST_WHOLE and inputs.erase == "tied" and can(inputs, cut=True)


def can(inputs: Inputs, cut: bool) -> bool:
    """Whether it can on any GPU; `cut`: of segments."""
    return (
        gradient_stage.can(inputs)
        and padded(inputs) == (SIZE, SIZE)
        and inputs.q.shape[2] == inputs.v.shape[2]
        and not (cut and inputs.cu_seqlens is not None)
    )


def backward(call: Call, d_end: torch.Tensor | None) -> None:
    """Launch the kernel: all gradients, from those by the states at the ends of the stretches."""
    inputs = call.inputs
    heads, tokens = inputs.q.shape[2], inputs.q.shape[1]
    given = (
        inputs.q, inputs.k, call["d_o"], inputs.v if inputs.beta is None else call["errors"],
        call["states"], call["scores"], call["corrections"], call["d_q"], call["d_k"], call["d_v"],
        call["scalings"], norms_of(call), call["chunk_decay"], call["d_beta"], inputs.log_decay,
        call["d_log_decay"], d_end, call["d_initial"], inputs.cu_seqlens,
        inputs.scale, heads, call.plan.per_segment, tokens, *strides(inputs.log_decay),
    )  # fmt: skip
    launch = call.once(backward_launch)
    launch((stretches(inputs, call.plan) * heads, 1, 1), *given)


def backward_launch(call: Call) -> Launch:
    """`fused_backward_kernel` with its constants."""
    inputs, tied = call.inputs, call.inputs.beta is not None
    value_size, (heads, key_size), rows = inputs.v.shape[3], inputs.q.shape[2:], CHUNK.value
    of_values, of_pairs = of_heads(heads, value_size, [rows, SIZE]), (rows, [rows, rows])
    tiles = dict.fromkeys(("q", "k", "d_q", "d_k"), of_heads(heads, key_size, [rows, SIZE]))
    tiles |= dict.fromkeys(("d_o", "d_v"), of_values)
    tiles["errors"] = (value_size, [rows, SIZE]) if tied else of_values
    if (where := call.once(ends)) != "whole":
        tiles = {name: (width, [1, 1, *tile]) for name, (width, tile) in tiles.items()}
    tiles["states"] = of_states(inputs, [SIZE, SIZE])
    tiles |= {x: of_pairs for x in ("scores", "corrections") if call[x] is not None}
    constants = {
        "K": SIZE, "V": SIZE, "KEYS": key_size, "WIDTH": value_size, "TIED": tied,
        "DECAY": inputs.log_decay is not None,
        "UNIT": inputs.normalize_qk, "ENDS": where, "CUT": call.plan.per_segment > 0,
        "REGISTERS": OTHERS, "num_warps": 8, "maxnreg": AVERAGE,
    }  # fmt: skip
    return FusedLaunch(fused_backward_kernel, constants, tiles)
