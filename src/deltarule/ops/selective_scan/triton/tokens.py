"""What the kernels of `selective_scan` read of one token: device functions that all of them use.

A tile of the state holds BK key channels (rows) of BV value channels (columns), so that a sum over
the keys stays within a thread. A key or query is a column [BK, 1], or where it is constant over
time a whole tile; gates of the values are rows [1, BV]. Tensors are contiguous. A token outside the
chunk reads as zeros everywhere, which neither decays nor writes.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.runtime.places import chunk_place

# What a kernel is compiled for, as one constant; without heads k or q has no time axis.
Sizes = namedtuple(
    "Sizes", "HQ HK HV V K CT BK BV G PACKED SIGNED REVERSE SIZE BE", defaults=(False, 0, 0)
)
# What a call is given, and the tiles of A, k and q where these have no time axis. Kernels make it
# themselves: of Triton 3.6 no device function may return a None.
Tokens = namedtuple("Tokens", "q k v delta value_log_decay log_decay beta b_A b_k b_q")
# The value head of a program, and the key and value channels of its tile.
Place = namedtuple("Place", "head o_k o_v")


@triton.jit
def tile_of(i_h, S: tl.constexpr):
    """A value head, and the channels of this program's tile."""
    o_k = tl.arange(0, S.BK)[:, None]
    return Place(i_h, o_k, tl.program_id(2) * S.BV + tl.arange(0, S.BV)[None, :])


@triton.jit
def state_offsets(i_m, at, S: tl.constexpr):
    place = (i_m.to(tl.int64) * S.HV + at.head) * S.V * S.K + at.o_v * S.K + at.o_k
    return place, (at.o_k < S.K) & (at.o_v < S.V)


@triton.jit
def load_constant(x, at, S: tl.constexpr):
    mask = (at.o_k < S.K) & (at.o_v < S.V)
    p_x = x + at.head * S.V * S.K + at.o_v * S.K + at.o_k
    return tl.load(p_x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tiles_without_time(A, k, q, at, S: tl.constexpr):
    b_A, b_k, b_q = 0.0, 0.0, 0.0
    if A is not None:
        b_A = load_constant(A, at, S)
    if S.HK == 0:
        b_k = load_constant(k, at, S)
    if S.HQ == 0:
        b_q = load_constant(q, at, S)
    return b_A, b_k, b_q


@triton.jit
def load_row(x, row, here, i_h, o, HEADS: tl.constexpr, C: tl.constexpr, S: tl.constexpr):
    """Channels o of value head i_h in row `row` of [B T, HEADS, C]; zeros unless `here`."""
    p_x = x + (row * HEADS + i_h // (S.HV // HEADS)) * C + o
    return tl.load(p_x, mask=here & (o < C), other=0.0).to(tl.float32)


@triton.jit
def load_values(x, row, here, at, S: tl.constexpr):
    return load_row(x, row, here, at.head, at.o_v, S.HV, S.V, S)


@triton.jit
def load_key(x, b_x, row, here, at, HEADS: tl.constexpr, S: tl.constexpr):
    """A key or query [BK, 1]; of a tensor without time (no HEADS) the tile b_x."""
    if HEADS == 0:
        return b_x
    else:  # noqa: RET505 (the compiler asks for one of the two)
        return load_row(x, row, here, at.head, at.o_k, HEADS, S.K, S)


@triton.jit
def exponential(x, row, here, at, S: tl.constexpr):
    """exp(delta A + value_log_decay + log_decay) of a token: [BK, BV]. SIGNED: 2 exp(..) - 1."""
    b_x = tl.zeros([S.BK, S.BV], tl.float32)
    if x.delta is not None:
        b_x += load_values(x.delta, row, here, at, S) * x.b_A
    if x.value_log_decay is not None:
        b_x += load_values(x.value_log_decay, row, here, at, S)
    if x.log_decay is not None:
        b_x += load_row(x.log_decay, row, here, at.head, at.o_k, S.HV, S.K, S)
    if S.SIGNED:
        return 2 * tl.exp(b_x) - 1
    else:  # noqa: RET505 (the compiler asks for one of the two)
        return tl.exp(b_x)


@triton.jit
def transition(x, row, here, at, S: tl.constexpr):
    """The factor of the state at a token and what is added to it, both [BK, BV].

    exp(..) (1 - beta k^2^T)        w k^T, w = v or beta v
    """
    b_f = exponential(x, row, here, at, S)
    b_key = load_key(x.k, x.b_k, row, here, at, S.HK, S)
    b_w = load_values(x.v, row, here, at, S)
    if x.beta is not None:
        b_beta = load_values(x.beta, row, here, at, S)
        b_f *= 1 - b_beta * (b_key * b_key)
        b_w *= b_beta
    return b_f, b_w * b_key


@triton.jit
def chunk_of_program(cu_seqlens, T, N, S: tl.constexpr):
    """This program's chunk: its number, its first token, and how many tokens it has."""
    i_m = tl.program_id(0)
    first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    return i_m, first, tl.minimum(tokens, S.CT)
