"""Who takes a packed call: the fused kernel, or the kernels that cut sequences into segments.

A program of the fused kernel has a whole sequence, and the longest one decides how long all take.
Lengths are known on the GPU alone, so both are launched, each with offsets of its own, and to one
of them all sequences are empty.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.triton.plan import Call, multiprocessors
from deltarule.ops.runtime.launch import Launch

# The longest sequence that the fused kernel takes, in a multiprocessor's shares of all tokens and
# heads: Triton's kernels take 2.2 times as long for a chunk.
MOST_SHARES = 2
OFFSETS = 256


@triton.jit(do_not_specialize=["N", "T", "most"])
def shares_kernel(cu_seqlens, fused, segments, N, T, most, BLOCK: tl.constexpr):
    """One program; [N + 1] each: the offsets for one of both, for the other zeros.

    In place of its zeros the fused kernel gets -1, to leave the final state alone, too.
    """
    longest = 0
    for first in range(0, N, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        start = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int64)
        end = tl.load(cu_seqlens + o_n + 1, mask=o_n < N, other=0).to(tl.int64)
        tokens = tl.minimum(end, T) - tl.minimum(tl.maximum(start, 0), T)
        longest = tl.maximum(longest, tl.max(tokens, axis=0))
    for first in range(0, N + 1, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        offset = tl.load(cu_seqlens + o_n, mask=o_n <= N, other=0)
        tl.store(fused + o_n, tl.where(longest <= most, offset, -1), mask=o_n <= N)
        tl.store(segments + o_n, tl.where(longest <= most, 0, offset), mask=o_n <= N)


def shares(call: Call) -> tuple[Tensor, Tensor]:
    """The offsets for the fused kernel, and for those that cut sequences."""
    inputs = call.inputs
    offsets = inputs.cu_seqlens
    assert offsets is not None
    fused, segments = (call.empty(tuple(offsets.shape), offsets.dtype) for _ in range(2))
    tokens, heads = inputs.q.shape[1], inputs.v.shape[2]
    most = int(MOST_SHARES * tokens * heads / multiprocessors(inputs.q.device))
    given = offsets, fused, segments, inputs.sequences, tokens, most
    call.run(call.once(shares_launch), (1, 1, 1), given)
    return fused, segments


def shares_launch(call: Call) -> Launch:
    """`shares_kernel` with its constants."""
    return Launch(shares_kernel, {"BLOCK": OFFSETS, "num_warps": 4, "num_stages": 1})
