"""q and k scaled by the sums of decays: what makes pairs plain products.

    q_i up_i        k_i up_i        k_i near_i        k_i rest_i

(channel_memory.py). Rounded to 16 bits are those that meet the state, as in every chunked form; of
the pairs' scores one side is, and `k near` is two numbers whose sum has the digits of both: with
one, the errors of o would be 1.05 to 1.17 times as large.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.channel_memory import SHIFT, UNSHIFT
from deltarule.ops.delta_rule.gluon.inverse import PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import CHUNK, GATES, READ, WRITE

# [8 or 16 tokens, K]: of 16 bits eight lanes have a row of 128 bytes, as it is swizzled.
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 2], [1, 0]))
# Of a float32 number's bits those that bfloat16 has.
HIGH_BITS = gl.constexpr(-65536)


@gluon.jit
def leave_copies(
    shared, slot, decays, number, scale, K: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """q and k of some tokens scaled, in their places and to `near` and `near_low`; k rest.

    SAVE: they go to global memory, too, in the order in which lanes have them.
    """
    tiles, _, _, saved = shared
    TOKEN: gl.constexpr = gl.SliceLayout(1, COPIES)
    dtype: gl.constexpr = tiles.q.dtype
    gate = slot * GATES
    q, k = tiles.q.index(slot).slice(FIRST, ROWS), tiles.k.index(slot).slice(FIRST, ROWS)
    sums = decays._reinterpret(gl.float32, [CHUNK, K], PLAIN_1D)
    c_end = sums.index(CHUNK - 1).load(gl.SliceLayout(0, COPIES))[None, :]
    c = decays.slice(FIRST, ROWS).load(COPIES)
    b_q, b_k = q.load(COPIES).to(gl.float32), k.load(COPIES).to(gl.float32)
    if FORM.NORMS:
        b_q *= tiles.gates.index(gate + READ).slice(FIRST, ROWS).load(TOKEN)[:, None]
        b_k *= tiles.gates.index(gate + WRITE).slice(FIRST, ROWS).load(TOKEN)[:, None]
    up = gl.exp2(c + SHIFT)
    q.store((b_q * up).to(dtype))
    if FORM.TIED:
        k.store((b_k * up).to(dtype))
    near = b_k * gl.exp2(-SHIFT - c)
    # Cut off and not rounded: the rest makes up for it, and one conversion is for two numbers.
    high = (near.to(gl.int32, bitcast=True) & HIGH_BITS).to(gl.float32, bitcast=True)
    out = tiles.near.index(0).slice(FIRST, ROWS) if FORM.TIED else k
    out.store(high.to(dtype))
    tiles.near_low.index(0).slice(FIRST, ROWS).store((near - high).to(dtype))
    rest = (b_k * gl.exp2(c_end - c)).to(dtype)
    if FORM.SAVE:
        o_t = FIRST + gl.arange(0, ROWS, TOKEN)[:, None]
        at = number.to(gl.int64) * (CHUNK * K)
        o_k = o_t * K + gl.arange(0, K, gl.SliceLayout(0, COPIES))[None, :]
        gl.store(saved.decayed_q + at + o_k, (b_q * up * (scale * UNSHIFT)).to(dtype))
        if FORM.TIED:
            gl.store(saved.erase + at + o_k, (b_k * up * UNSHIFT).to(dtype))
        gl.store(saved.write + at + o_k, rest)
    return rest
