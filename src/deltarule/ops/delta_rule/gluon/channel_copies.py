"""Sums of a chunk's log decays, and q and k scaled by them: what makes pairs plain products.

    c_i = sum of log2 decay up to token i of the chunk

    q_i up_i        k_i up_i        k_i near_i        k_i rest_i

(channel_memory.py). Rounded to 16 bits are those that meet the state, as in every chunked form; of
the pairs' scores one side is, and `k near` is two numbers whose sum has the digits of both: with
one, the errors of o would be 1.05 to 1.17 times as large.

A decay of less than 2^-127 is a reset, and counts as 2^-127 (gates.py says why it may).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.channel_memory import SHIFT
from deltarule.ops.delta_rule.gluon.gates import LOG2_E, RESET, add
from deltarule.ops.delta_rule.gluon.inverse import PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import BLOCK, BLOCKS, CHUNK, GATES, READ, WRITE

# [16 tokens, K]: a thread has four by four, so that it adds up the decays of four tokens alone.
COPIES = gl.constexpr(gl.BlockedLayout([4, 4], [4, 8], [1, 4], [1, 0]))
# Of a float32 number's bits those that bfloat16 has.
HIGH_BITS = gl.constexpr(-65536)


@gluon.jit
def leave_sums(tiles, slot, K: gl.constexpr):
    """c in the place of the log decays, and 2^c_end to `ends`; returns the least of c_end."""
    c_end = gl.zeros([K], gl.float32, gl.SliceLayout(0, COPIES))
    for block in gl.static_range(BLOCKS):
        part = tiles.decays.slice(block * BLOCK, BLOCK)
        steps = gl.maximum(part.load(COPIES) * LOG2_E, RESET)
        part.store(gl.associative_scan(steps, 0, add) + c_end[None, :])
        c_end += gl.sum(steps, 0)
    tiles.ends.index(slot).store(gl.exp2(c_end))
    return gl.min(c_end, 0)


@gluon.jit
def leave_copies(tiles, slot, K: gl.constexpr, FIRST: gl.constexpr, FORM: gl.constexpr):
    """q and k of 16 tokens scaled: in their places, and to `near`, `near_low` and `write`."""
    TOKEN: gl.constexpr = gl.SliceLayout(1, COPIES)
    dtype: gl.constexpr = tiles.q.dtype
    gate = slot * GATES
    q, k = tiles.q.index(slot).slice(FIRST, BLOCK), tiles.k.index(slot).slice(FIRST, BLOCK)
    sums = tiles.decays._reinterpret(gl.float32, [CHUNK, K], PLAIN_1D)
    c_end = sums.index(CHUNK - 1).load(gl.SliceLayout(0, COPIES))[None, :]
    c = tiles.decays.slice(FIRST, BLOCK).load(COPIES)
    b_q, b_k = q.load(COPIES).to(gl.float32), k.load(COPIES).to(gl.float32)
    if FORM.NORMS:
        b_q *= tiles.gates.index(gate + READ).slice(FIRST, BLOCK).load(TOKEN)[:, None]
        b_k *= tiles.gates.index(gate + WRITE).slice(FIRST, BLOCK).load(TOKEN)[:, None]
    up = gl.exp2(c + SHIFT)
    q.store((b_q * up).to(dtype))
    if FORM.TIED:
        k.store((b_k * up).to(dtype))
    near = b_k * gl.exp2(-SHIFT - c)
    # Cut off and not rounded: the rest makes up for it, and one conversion is for two numbers.
    high = (near.to(gl.int32, bitcast=True) & HIGH_BITS).to(gl.float32, bitcast=True)
    tiles.near.slice(FIRST, BLOCK).store(high.to(dtype))
    tiles.near_low.slice(FIRST, BLOCK).store((near - high).to(dtype))
    tiles.write.slice(FIRST, BLOCK).store((b_k * gl.exp2(c_end - c)).to(dtype))
