"""When the gradients of chunks with a decay per channel are one kernel of roles, and its launch."""

import torch

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.gluon.channel_gradients import channel_gradients_kernel
from deltarule.ops.delta_rule.gluon.channel_stage import SIZES, in_rows
from deltarule.ops.delta_rule.gluon.gradient_stage import AVERAGE, LEAST_PAIRS, ends
from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.delta_rule.gluon.stage import FusedLaunch, norms_of
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Call
from deltarule.ops.runtime.launch import Launch, multiprocessors

# Registers of the roles of one warp.
OTHERS = 40


def takes(call: Call) -> bool:
    """Whether it takes the gradients of this call: a function of shapes, types and the GPU."""
    if not stage.TRAINING or not can(call.inputs):
        return False
    processors = multiprocessors(call.inputs.q.device)
    return call.plan.chunks * call.inputs.q.shape[2] >= LEAST_PAIRS * processors


def can(inputs: Inputs) -> bool:
    """Whether it can on any GPU of Hopper."""
    return (
        inputs.q.dtype == torch.bfloat16 and (inputs.q.shape[3], inputs.v.shape[3]) == SIZES
        and inputs.q.shape[2] == inputs.v.shape[2] and inputs.decay == "channel"
        and inputs.erase != "free" and inputs.n_steps == 1 and not inputs.batch_invariant
    )  # fmt: skip


def launch(call: Call) -> None:
    """Launch `channel_gradients_kernel`: every gradient but that by v."""
    inputs, tied, decays = call.inputs, call.inputs.beta is not None, call.inputs.log_decay
    assert decays is not None
    batch, tokens, heads, _ = inputs.q.shape
    packed = inputs.cu_seqlens is not None
    # Packed sequences have one row of chunks.
    pairs, chunks = call.plan.chunks * heads, call.plan.chunks // (1 if packed else batch)
    errors = (call["errors"], call["d_errors"]) if tied else (inputs.v, inputs.v)
    given = (
        inputs.q, inputs.k, call["d_o"], *errors, call["states"], call["d_states"],
        in_rows(decays), call["d_q"], call["d_k"], call["d_log_decay"], call["scalings"],
        norms_of(call), call["d_beta"],
        *((inputs.cu_seqlens, inputs.sequences) if packed else (None, None)), inputs.scale, pairs,
        heads, chunks, tokens,
    )  # fmt: skip
    programs = min(multiprocessors(inputs.q.device), pairs)
    call.once(channel_gradients_launch)((programs, 1, 1), *given)


def channel_gradients_launch(call: Call) -> Launch:
    """`channel_gradients_kernel` with its constants."""
    inputs, tied = call.inputs, call.inputs.beta is not None
    (heads, key_size), value_size, rows = inputs.q.shape[2:], inputs.v.shape[3], CHUNK.value
    of_keys, of_values = (
        (heads * key_size, [rows, key_size]),
        (heads * value_size, [rows, value_size]),
    )
    of_chunk, of_state = (value_size, [rows, value_size]), (key_size, [value_size, key_size])
    tiles = dict.fromkeys(("q", "k", "d_q", "d_k", "log_decay", "d_log_decay"), of_keys)
    tiles |= dict.fromkeys(("errors", "d_errors"), of_chunk if tied else of_values)
    tiles["d_o"] = of_values
    if (where := call.once(ends)) != "whole":
        tiles = {name: (width, [1, 1, *tile]) for name, (width, tile) in tiles.items()}
    tiles |= {"states": of_state, "d_states": of_state}
    constants = {
        "K": key_size, "V": value_size, "TIED": tied, "UNIT": inputs.normalize_qk, "ENDS": where,
        "REGISTERS": OTHERS, "num_warps": 8, "maxnreg": AVERAGE,
    }  # fmt: skip
    return FusedLaunch(channel_gradients_kernel, constants, tiles)
