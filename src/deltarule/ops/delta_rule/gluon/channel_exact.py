"""Pairs of the tokens that decay below 2^-RANGE of the chunk's start, each by its own exponents.

    P_ij = scale sum_c q_ic k_jc 2^(c_i - c_j)_c        M_ij = sum_c k_ic k_jc 2^(c_i - c_j)_c

As c never grows these are the last tokens of a chunk, and a strong decay changes no digit of the
tokens before it. What they read of the state, and what they write to it, stays as it is: of those
exponents float32 can hold all.

It runs between the sums and the copies, when q and k are as they were given. A chunk of such tokens
alone takes some ten times as long as another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.channel_memory import RANGE
from deltarule.ops.delta_rule.gluon.inverse import PLAIN_1D
from deltarule.ops.delta_rule.gluon.memory import BLOCK, BLOCKS, CHUNK, GATE, GATES

# [16 tokens, K]: eight lanes add up the channels of a token.
TOKENS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def fast_tokens(decays):
    """How many tokens come before the first for which a channel is below -RANGE."""
    count = 0
    for block in gl.static_range(BLOCKS):
        c = decays.slice(block * BLOCK, BLOCK).load(TOKENS)
        count += gl.sum(gl.where(gl.min(c, 1) >= -RANGE, 1, 0), 0)
    return count


@gluon.jit
def leave_exact(tiles, slot, decays, of, first, tokens, scale, K: gl.constexpr, FORM: gl.constexpr):
    """P and M of those tokens, in the memory of P and T, in rows; returns the number of others.

    `of` points at q, k, 1 / |q| and 1 / |k| of a sequence of so many `tokens`, the chunk's from
    number `first` on.
    """
    CHANNEL: gl.constexpr = gl.SliceLayout(0, TOKENS)
    q, k, stride, q_norm, k_norm, s_norm = of
    o_k = gl.arange(0, K, CHANNEL)
    sums = decays._reinterpret(gl.float32, [CHUNK, K], PLAIN_1D)
    scores = tiles.p.index(0)._reinterpret(tiles.p.dtype, [CHUNK, CHUNK], PLAIN_1D)
    pairs = scores
    if FORM.TIED:
        pairs = tiles.t.index(slot)._reinterpret(gl.float16, [CHUNK, CHUNK], PLAIN_1D)
    fast = fast_tokens(decays)
    for i in range(fast, CHUNK):
        row = first + i
        there = row < tokens
        c_i = sums.index(i).load(CHANNEL)[None, :]
        q_i = gl.load(q + row * stride + o_k, mask=(o_k < K) & there, other=0.0).to(gl.float32)
        k_i = gl.load(k + row * stride + o_k, mask=(o_k < K) & there, other=0.0).to(gl.float32)
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
