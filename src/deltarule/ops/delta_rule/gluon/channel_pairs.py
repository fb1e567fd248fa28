"""q and k scaled by the sums of decays, and P of some rows of a chunk: products of such copies.

    q_i up_i        k_i up_i        k_i near_i        k_i rest_i

    P_ij = scale (q_i up_i) . (k_j near_j)        for j <= i, and 0 for the others

(channel_memory.py). Rounded to 16 bits are those that meet the state, as in every chunked form; of
the pairs' scores one side is, and `k near` is two numbers whose sum has the digits of both: with
one, the errors of o would be 1.05 to 1.17 times as large.

Pairs of the tokens that decay below 2^-RANGE of the chunk's start have exponents of their own:

    P_ij = scale sum_c q_ic k_jc 2^(c_i - c_j)_c        M_ij = sum_c k_ic k_jc 2^(c_i - c_j)_c

As c never grows these are the last tokens of a chunk, and a strong decay changes no digit of the
tokens before it. What they read of the state, and what they write to it, stays as it is: of those
exponents float32 can hold all. They come between the sums and the copies, when q and k are as they
were given. A chunk of such tokens alone takes some ten times as long as another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from deltarule.ops.delta_rule.gluon.channel_memory import RANGE, SHIFT, UNSHIFT, of_chunk
from deltarule.ops.delta_rule.gluon.inverse import PLAIN, PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import BLOCK, BLOCKS, CHUNK, GATE, GATES, grid, product
from deltarule.ops.runtime.gluon_tiles import barrier, square

# [8 or 16 tokens, K]: of 16 bits eight lanes have a row of 128 bytes, as it is swizzled.
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 2], [1, 0]))
# The same of words of two numbers.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [2, 2], [1, 0]))
# Of a float32 number's bits those that bfloat16 has.
HIGH_BITS = gl.constexpr(-65536)
# [16 tokens, K]: eight lanes add up the channels of a token.
TOKENS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
# A number that every thread has.
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def numbers(tile, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Rows of a tile in float32; a word has two, of which one takes a shift and one a mask."""
    K: gl.constexpr = tile.shape[1]
    words = tile._reinterpret(gl.int32, [CHUNK, K // 2], square(bits=32))
    words = words.slice(FIRST, ROWS).load(WORDS)
    even = (words * 65536).to(gl.float32, bitcast=True)
    odd = (words & HIGH_BITS).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [ROWS, K]), COPIES)


@gluon.jit
def leave_copies(
    shared, slot, decays, number, far, scale, FIRST: gl.constexpr, ROWS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """q and k of some tokens scaled, in their places and to `near` and `near_low`; k rest.

    That is k near 2^(c_end + SHIFT), unless some tokens of the chunk decay too far (`far`).

    SAVE: they go to global memory, too, in the order in which lanes have them. All powers are taken
    then: what others are made of would have to be kept, and its registers are full.
    """
    tiles, _, _, saved = shared
    TOKEN: gl.constexpr = gl.SliceLayout(1, COPIES)
    dtype: gl.constexpr = tiles.q.dtype
    gate = slot * GATES
    q, k = tiles.q.index(slot).slice(FIRST, ROWS), tiles.k.index(slot).slice(FIRST, ROWS)
    sums = decays._reinterpret(gl.float32, [CHUNK, FORM.K], PLAIN_1D)
    c_end = sums.index(CHUNK - 1).load(gl.SliceLayout(0, COPIES))[None, :]
    c = decays.slice(FIRST, ROWS).load(COPIES)
    if FORM.SAVE:
        b_q, b_k = q.load(COPIES).to(gl.float32), k.load(COPIES).to(gl.float32)
    else:
        b_q = numbers(tiles.q.index(slot), FIRST, ROWS)
        b_k = numbers(tiles.k.index(slot), FIRST, ROWS)
    if FORM.NORMS:
        b_q *= tiles.gates.index(gate + GATE.READ).slice(FIRST, ROWS).load(TOKEN)[:, None]
        b_k *= tiles.gates.index(gate + GATE.WRITE).slice(FIRST, ROWS).load(TOKEN)[:, None]
    shifted = c + SHIFT
    up = gl.exp2(shifted)
    q.store((b_q * up).to(dtype))
    if FORM.TIED:
        k.store((b_k * up).to(dtype))
    near = b_k * gl.exp2(-SHIFT - c if FORM.SAVE else shifted * -1.0)
    # Cut off and not rounded: the rest makes up for it, and one conversion is for two numbers.
    high = (near.to(gl.int32, bitcast=True) & HIGH_BITS).to(gl.float32, bitcast=True)
    out = tiles.near.index(0).slice(FIRST, ROWS) if FORM.TIED else k
    out.store(high.to(dtype))
    tiles.near_low.index(0).slice(FIRST, ROWS).store((near - high).to(dtype))
    if FORM.SAVE:
        rest = (b_k * gl.exp2(c_end - c)).to(dtype)
        o_t = FIRST + gl.arange(0, ROWS, TOKEN)[:, None]
        at = number.to(gl.int64) * (CHUNK * FORM.K)
        o_k = o_t * FORM.K + gl.arange(0, FORM.K, gl.SliceLayout(0, COPIES))[None, :]
        gl.store(saved.decayed_q + at + o_k, (b_q * up * (scale * UNSHIFT)).to(dtype))
        if FORM.TIED:
            gl.store(saved.erase + at + o_k, (b_k * up * UNSHIFT).to(dtype))
        gl.store(saved.write + at + o_k, rest)
    else:
        rest = (near * gl.exp2(c_end + SHIFT)).to(dtype)
        if far == 1:
            # `near` may be infinite. Sums are read again: a choice would cost all chunks powers.
            rest = (b_k * gl.exp2(c_end - decays.slice(FIRST, ROWS).load(COPIES))).to(dtype)
    return rest


@gluon.jit
def leave_scores(
    tiles, slot, i, scale, FIRST: gl.constexpr, ROWS: gl.constexpr, FORM: gl.constexpr
):
    """P of the rows from FIRST on; of tokens that decay too far what is in its memory already."""
    LAYOUT: gl.constexpr = product(ROWS)
    o_j, o_i = grid(CHUNK, ROWS, LAYOUT)
    zero = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    fast = gl.sum(tiles.fast.load(ONE), 0).to(gl.int32)
    q = tiles.q.index(slot).slice(FIRST, ROWS).permute((1, 0))
    near = of_chunk(tiles.near, i) if FORM.TIED else tiles.k.index(slot)
    p = warpgroup_mma(near, q, zero, use_acc=False, is_async=True)
    p = warpgroup_mma(of_chunk(tiles.near_low, i), q, p, is_async=True)
    p = warpgroup_mma_wait(0, deps=(p,))
    # i >= j with what the compiler knows of i on one side alone, as in score.py; and a choice,
    # because what is above the diagonal may be infinite.
    lane, known = o_j - (o_i & 6), (o_i & 57) + FIRST
    p = gl.where(known >= lane, p, 0.0) * scale
    if fast < CHUNK:
        exact = tiles.p.index(0)._reinterpret(tiles.p.dtype, [CHUNK, CHUNK], PLAIN)
        exact = exact.slice(FIRST, ROWS).permute((1, 0)).load(LAYOUT).to(gl.float32)
        p = gl.where(o_i + FIRST < fast, p, gl.where(known >= lane, exact, 0.0))
        barrier()
    tiles.p.index(0).slice(FIRST, ROWS).permute((1, 0)).store(p.to(tiles.p.dtype))


@gluon.jit
def fast_tokens(decays):
    """How many tokens come before the first for which a channel is below -RANGE."""
    count = 0
    for block in gl.static_range(BLOCKS):
        c = decays.slice(block * BLOCK, BLOCK).load(TOKENS)
        count += gl.sum(gl.where(gl.min(c, 1) >= -RANGE, 1, 0), 0)
    return count


@gluon.jit
def leave_exact(tiles, slot, decays, of, first, tokens, scale, FORM: gl.constexpr):
    """P and M of those tokens, in the memory of P and U, in rows; returns the number of others.

    `of` points at q, k, 1 / |q| and 1 / |k| of a sequence of so many `tokens`, the chunk's from
    number `first` on.
    """
    CHANNEL: gl.constexpr = gl.SliceLayout(0, TOKENS)
    q, k, stride, q_norm, k_norm, s_norm = of
    o_k = gl.arange(0, FORM.K, CHANNEL)
    sums = decays._reinterpret(gl.float32, [CHUNK, FORM.K], PLAIN_1D)
    scores = tiles.p.index(0)._reinterpret(tiles.p.dtype, [CHUNK, CHUNK], PLAIN_1D)
    pairs = scores
    if FORM.TIED:
        pairs = tiles.u.index(slot)._reinterpret(gl.float16, [CHUNK, CHUNK], PLAIN_1D)
    fast = fast_tokens(decays)
    for i in range(fast, CHUNK):
        row = first + i
        there = row < tokens
        c_i = sums.index(i).load(CHANNEL)[None, :]
        q_i = gl.load(q + row * stride + o_k, mask=(o_k < FORM.K) & there, other=0.0).to(gl.float32)
        k_i = gl.load(k + row * stride + o_k, mask=(o_k < FORM.K) & there, other=0.0).to(gl.float32)
        read, key = scale, 1.0
        if FORM.NORMS:
            read = scale * gl.load(q_norm + row * s_norm, mask=there, other=0.0)
            key = gl.load(k_norm + row * s_norm, mask=there, other=0.0)
        for block in gl.static_range(BLOCKS):
            # Of tokens after i nobody asks.
            if block * BLOCK <= i:
                p, m = with_block(tiles, slot, decays, c_i, q_i, k_i, block * BLOCK, FORM)
                scores.index(i).slice(block * BLOCK, BLOCK).store((p * read).to(scores.dtype))
                if FORM.TIED:
                    pairs.index(i).slice(block * BLOCK, BLOCK).store((m * key).to(gl.float16))
    return fast


@gluon.jit
def with_block(tiles, slot, decays, c_i, q_i, k_i, FIRST: gl.constexpr, FORM: gl.constexpr):
    """q_i . k_j and k_i . k_j with decays, of the 16 tokens j from FIRST on."""
    c = decays.slice(FIRST, BLOCK).load(TOKENS)
    k = tiles.k.index(slot).slice(FIRST, BLOCK).load(TOKENS).to(gl.float32)
    k *= gl.exp2(gl.minimum(c_i - c, 0.0))
    p, m = gl.sum(k * q_i[None, :], 1), gl.sum(k * k_i[None, :], 1)
    if FORM.NORMS:
        gate = tiles.gates.index(slot * GATES + GATE.WRITE)
        key = gate.slice(FIRST, BLOCK).load(gl.SliceLayout(1, TOKENS))
        p *= key
        m *= key
    return p, m
