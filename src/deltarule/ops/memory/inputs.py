"""The checks that `ttt` and `titans` share: the maps of a memory, their sizes, and positions."""

import torch
from torch import Tensor

from deltarule.ops.checks import check_sequence
from deltarule.ops.dispatch import constant_when_compiled
from deltarule.ops.fused_kernels import why_not_fused
from deltarule.ops.plain import (
    Arguments,
    check_counts,
    check_per_head,
    check_state_tensor,
    count_sequences,
)
from deltarule.shapes import TitansState, TTTState

Maps = tuple[Tensor, ...]

# Tokens of a mini-batch are rows of one tile.
MAX_MINI_BATCH = 16
# What a program holds in registers: three maps, and rows of tokens; and what it streams from the
# cache, blocks of one map or two. Without a norm the value channels of a single map know nothing of
# each other, and are shared out.
HELD_CHANNELS, STREAMED_CHANNELS = 64, 128
# Where a product can read its operands from shared memory: elsewhere they fill the registers, and
# the compiler moves kilobytes of each thread to memory and back.
CAPABILITIES = (9, 10)


@constant_when_compiled
def capability(device: int | None) -> int:
    return torch.cuda.get_device_capability(device)[0]


def why_not_triton(arguments: Arguments, mini_batch: int) -> str | None:
    q, v, maps = arguments["q"], arguments["v"], arguments["initial_state"].weights
    if (reason := why_not_fused(q, "q")) is not None:
        return reason
    if (major := capability(q.device.index)) not in CAPABILITIES:
        return (
            "the Triton kernels of a memory are made for compute capability 9 and 10, "
            f"this device has {major}"
        )
    if len(maps) > 2:
        return f"the Triton kernels take memories of one map or two, got {len(maps)}"
    keys, values = q.shape[3], v.shape[3]
    shares = len(maps) == 1 and not isinstance(arguments["initial_state"], TTTState)
    wide = max(keys, 0 if shares else values) > STREAMED_CHANNELS
    if wide or mini_batch > MAX_MINI_BATCH:
        return (
            f"the Triton kernels take K and V up to {STREAMED_CHANNELS} (with one map and no norm "
            f"any V) and mini-batches up to {MAX_MINI_BATCH}, got K = {keys}, V = {values} and "
            f"{mini_batch}"
        )
    return None


def check_call(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> int:
    check_sequence(q, k, v, 1)
    check_per_head("beta", beta, "[B, T, HV]", (*q.shape[:2], v.shape[2]), q)
    return count_sequences(q, lengths, cu_seqlens)


def check_memory(
    state: object, kind: type[TTTState | TitansState], mini_batch: int, sequences: int, q: Tensor,
    v: Tensor,
) -> None:  # fmt: skip
    """Maps that lead from K to V channels, the same sizes in every part of the state."""
    if not isinstance(state, kind):
        raise ValueError(
            f"initial_state must be a {kind.__name__}, got {type(state).__name__}: "
            f"begin with {kind.__name__}.start(weights, sequences)"
        )
    bias = int(kind is TTTState)
    letters = "[N, HV, outputs, inputs + 1]" if bias else "[N, HV, outputs, inputs]"
    for name, maps in zip(kind._fields[:-1], state[:-1], strict=True):
        given = isinstance(maps, tuple) and all(isinstance(x, Tensor) for x in maps)
        if not given or not maps or len(maps) != len(state.weights):
            raise ValueError(
                f"initial_state.{name} must be a tuple of tensors, one for each map of the memory, "
                f"got {type(maps).__name__}"
            )
        inputs = q.shape[3]
        # A map takes what the one before puts out; the last puts out V.
        for index, (x, of) in enumerate(zip(maps, state.weights, strict=True)):
            outputs = v.shape[3] if index + 1 == len(maps) or of.ndim < 2 else of.shape[-2]
            size = sequences, v.shape[2], outputs, inputs + bias
            check_state_tensor(f"initial_state.{name}[{index}]", x, letters, size, q)
            inputs = outputs
    check_counts("initial_state.position", state.position, sequences, mini_batch - 1, q)
