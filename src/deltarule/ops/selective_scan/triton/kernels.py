"""The kernels of `selective_scan`: chunks from the states at their starts, and these states before.

A chunk: the outputs, or all gradients.

    S_t = f_t * S_{t-1} + w_t k_t^T        o_t = scale S_t q_t        w = v or beta v
    f_t = e_t (1 - beta_t k_t^2^T)         e_t = exp(delta_t A + value_log_decay_t + log_decay_t)
                                           or signed, 2 exp(..) - 1

and with D_t the gradient by S_t, which holds that by o_t and f_{t+1} * D_{t+1}, and X = D * S_{t-1}

    dq_t = scale dO_t S_t        dw_t = D_t k_t        dk_t = D_t w_t - 2 beta (X e)_t k_t
    d exponent_t = X_t f_t       dbeta_t = v_t dw_t - X_t e_t k_t^2        dv_t = dw_t, or beta dw_t
    signed: d exponent_t = X_t (e_t + 1) (1 - beta_t k_t^2^T)

The backward runs the chunk forward once more: it notes the state at every G-th token, and holds in
registers those of the G tokens that it goes back through. A gradient of q, k or log_decay is a
sum over the value channels, of which a program adds its BV: the launcher adds the parts.

The states between chunks, or the gradients there: every chunk on its own finds what it makes of a
state of zeros, and what it leaves of any other; then one pass over the chunks of each sequence puts
the two together:

    S_end = left * S_start + local        dS_start = left * dS_end + d_local

A tile of the state holds BK key channels (rows) of BV value channels (columns), so that a sum over
the keys stays within a thread. A key or query is a column [BK, 1], or where it is constant over
time a whole tile; gates of the values are rows [1, BV]. Tensors are contiguous. A token outside the
chunk reads as zeros everywhere, which neither decays nor writes.
"""

from collections import namedtuple

import triton
import triton.language as tl

from deltarule.ops.runtime.places import chunk_place, first_chunk, sequence_bounds

# What a kernel is compiled for, as one constant; without heads k or q has no time axis.
Sizes = namedtuple(
    "Sizes", "HQ HK HV V K CT BK BV G PACKED SIGNED REVERSE SIZE BE", defaults=(False, 0, 0)
)
# What a call is given, and the tiles of A, k and q where these have no time axis. Kernels make it
# themselves: of Triton 3.6 no device function may return a None.
Tokens = namedtuple("Tokens", "q k v delta value_log_decay log_decay beta b_A b_k b_q")
# The value head of a program, and the key and value channels of its tile.
Place = namedtuple("Place", "head o_k o_v")
# The gradient by o, and where others go: parts of those of keys are s_part tokens apart.
Gradients = namedtuple(
    "Gradients", "d_o d_q d_k d_v d_delta d_value_log_decay d_log_decay d_beta s_part"
)
# Chunks whose states are fetched before the first is needed.
AHEAD = tl.constexpr(4)


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


@triton.jit(do_not_specialize=["T", "N"])
def read_kernel(
    q, k, v, delta, A, value_log_decay, log_decay, beta, cu_seqlens, states, o, final_state, scale,
    T, N, S: tl.constexpr,
):  # fmt: skip
    """o, and with `final_state` the state at the end; states None: they are zeros."""
    i_m, first, tokens = chunk_of_program(cu_seqlens, T, N, S)
    if tokens <= 0:
        return
    at = tile_of(tl.program_id(1), S)
    b_A, b_k, b_q = tiles_without_time(A, k, q, at, S)
    x = Tokens(q, k, v, delta, value_log_decay, log_decay, beta, b_A, b_k, b_q)
    place, mask = state_offsets(i_m, at, S)
    b_s = tl.zeros([S.BK, S.BV], tl.float32)
    if states is not None:
        b_s = tl.load(states + place, mask=mask, other=0.0)
    o_row = tl.program_id(2) * S.BV + tl.arange(0, S.BV)
    p_o, m_v = o + (first * S.HV + at.head) * S.V + o_row, o_row < S.V
    for i_g in range(0, tokens, S.G):
        # Stored after the last token's loads: the assembler moves no load across a store.
        outputs = ()
        for j in tl.static_range(S.G):
            t = i_g + j
            here = t < tokens
            b_f, b_new = transition(x, first + t, here, at, S)
            b_s = b_s * b_f + b_new
            b_query = load_key(q, x.b_q, first + t, here, at, S.HQ, S)
            outputs = outputs + (tl.sum(b_s * b_query, axis=0) * scale,)  # type: ignore[assignment]  # noqa: RUF005
        for j in tl.static_range(S.G):
            tl.store(
                p_o + (i_g + j) * (S.HV * S.V),
                outputs[j].to(o.dtype.element_ty),
                mask=m_v & (i_g + j < tokens),
            )
    if final_state is not None:
        tl.store(final_state + place, b_s, mask=mask)


@triton.jit(do_not_specialize=["T", "N"])
def read_backward_kernel(
    q, k, v, delta, A, value_log_decay, log_decay, beta, cu_seqlens, states, ends, noted, d_o,
    d_q, d_k, d_v, d_delta, d_A, d_value_log_decay, d_log_decay, d_beta, d_initial, scale, T, N,
    s_part, S: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk; parts of d_q, d_k and d_log_decay are s_part tokens apart."""
    i_m, first, tokens = chunk_of_program(cu_seqlens, T, N, S)
    if tokens <= 0:
        return
    i_h, i_v = tl.program_id(1), tl.program_id(2)
    at = tile_of(i_h, S)
    b_A, b_k, b_q = tiles_without_time(A, k, q, at, S)
    x = Tokens(q, k, v, delta, value_log_decay, log_decay, beta, b_A, b_k, b_q)
    y = Gradients(d_o, d_q, d_k, d_v, d_delta, d_value_log_decay, d_log_decay, d_beta, s_part)
    b_dA = tl.zeros([S.BK, S.BV], tl.float32)
    b_dk_all, b_dq_all = b_dA, b_dA
    place, mask = state_offsets(i_m, at, S)
    b_s = tl.zeros([S.BK, S.BV], tl.float32)
    if states is not None:
        b_s = tl.load(states + place, mask=mask, other=0.0)
    program = (i_m.to(tl.int64) * S.HV + at.head) * tl.num_programs(2) + i_v
    p_noted = noted + program * (S.CT // S.G * S.BK * S.BV)
    p_noted = p_noted + at.o_k * S.BV + tl.arange(0, S.BV)[None, :]
    groups = tl.cdiv(tokens, S.G)
    for i_g in range(groups):
        tl.store(p_noted + i_g * (S.BK * S.BV), b_s)
        for j in tl.static_range(S.G):
            t = i_g * S.G + j
            b_f, b_new = transition(x, first + t, t < tokens, at, S)
            b_s = b_s * b_f + b_new
    tl.debug_barrier()
    b_d = tl.load(ends + place, mask=mask, other=0.0)
    for i_back in range(groups):
        i_g = groups - 1 - i_back
        held = (tl.load(p_noted + i_g * (S.BK * S.BV)),)
        for j in tl.static_range(S.G):
            t = i_g * S.G + j
            b_f, b_new = transition(x, first + t, t < tokens, at, S)
            held = held + (held[j] * b_f + b_new,)  # type: ignore[assignment]  # noqa: RUF005
        for j in tl.static_range(S.G):
            t = i_g * S.G + S.G - 1 - j
            row, here = first + t, t < tokens
            b_d, b_dq, b_dk, b_dA = token_backward(
                b_d, held[S.G - j], held[S.G - 1 - j], b_dA, x, y, scale, row, here, i_v, at, S
            )
            if S.HQ == 0:
                b_dq_all += b_dq
            if S.HK == 0:
                b_dk_all += b_dk
    if delta is not None:
        tl.store(d_A + place, b_dA, mask=mask)
    if S.HK == 0:
        tl.store(d_k + place, b_dk_all, mask=mask)
    if S.HQ == 0:
        tl.store(d_q + place, b_dq_all, mask=mask)
    if d_initial is not None:
        tl.store(d_initial + place, b_d, mask=mask)


@triton.jit
def token_backward(b_d, b_after, b_before, b_dA, x, y, scale, row, here, i_v, at, S: tl.constexpr):
    """Store what a token gives; return the gradient by the state before it, and d_q, d_k, d_A."""
    o_row = i_v * S.BV + tl.arange(0, S.BV)
    p_v, m_v = row * (S.HV * S.V) + at.head * S.V + o_row, here & (o_row < S.V)
    b_key = load_key(x.k, x.b_k, row, here, at, S.HK, S)
    b_w = load_values(x.v, row, here, at, S)
    b_f = exponential(x, row, here, at, S)
    b_do = load_values(y.d_o, row, here, at, S) * scale
    b_d += b_do * load_key(x.q, x.b_q, row, here, at, S.HQ, S)
    b_dq, b_dw = b_do * b_after, tl.sum(b_d * b_key, axis=0)
    b_moved = b_d * b_before
    b_x = b_moved * b_f
    if x.beta is not None:
        b_beta = load_values(x.beta, row, here, at, S)
        b_dbeta = b_dw * tl.reshape(b_w, (S.BV,)) - tl.sum(b_x * (b_key * b_key), axis=0)
        tl.store(y.d_beta + p_v, b_dbeta.to(y.d_beta.dtype.element_ty), mask=m_v)
        b_dk = b_d * (b_beta * b_w) - 2 * b_beta * (b_x * b_key)
        b_dw *= tl.reshape(b_beta, (S.BV,))
        b_erase = 1 - b_beta * (b_key * b_key)
        b_x *= b_erase
        b_moved *= b_erase
        b_f *= b_erase
    else:
        b_dk = b_d * b_w
    if S.SIGNED:
        b_x += b_moved
    tl.store(y.d_v + p_v, b_dw.to(y.d_v.dtype.element_ty), mask=m_v)
    if x.delta is not None:
        b_dA += b_x * load_values(x.delta, row, here, at, S)
        b_ddelta = tl.sum(b_x * x.b_A, axis=0)
        tl.store(y.d_delta + p_v, b_ddelta.to(y.d_delta.dtype.element_ty), mask=m_v)
    if x.value_log_decay is not None:
        tl.store(y.d_value_log_decay + p_v, tl.sum(b_x, axis=0), mask=m_v)
    store_key_gradient(y.d_q, b_dq, row, here, i_v, at, y.s_part, S.HQ, S)
    store_key_gradient(y.d_k, b_dk, row, here, i_v, at, y.s_part, S.HK, S)
    if x.log_decay is not None:
        store_key_gradient(y.d_log_decay, b_x, row, here, i_v, at, y.s_part, S.HV, S)
    return b_d * b_f, b_dq, b_dk, b_dA


@triton.jit
def store_key_gradient(d_x, b_dx, row, here, i_v, at, s_part, HEADS: tl.constexpr, S: tl.constexpr):
    """This program's part of a gradient [value blocks, HV // HEADS, tokens, HEADS, K]."""
    if HEADS != 0:
        SHARING: tl.constexpr = S.HV // HEADS
        i_part = i_v * SHARING + at.head % SHARING
        place = (i_part * s_part + row) * (HEADS * S.K) + at.head // SHARING * S.K + at.o_k
        tl.store(d_x + place, tl.sum(b_dx, axis=1, keep_dims=True), mask=here & (at.o_k < S.K))


@triton.jit(do_not_specialize=["T", "N"])
def chunk_summary_kernel(
    q, k, v, delta, A, value_log_decay, log_decay, beta, d_o, cu_seqlens, local, left, scale, T, N,
    S: tl.constexpr,
):  # fmt: skip
    """local and left [M, HV, V, K] of one chunk; REVERSE: of the gradients, from its end."""
    i_m, first, tokens = chunk_of_program(cu_seqlens, T, N, S)
    if tokens <= 0:
        return
    at = tile_of(tl.program_id(1), S)
    b_A, b_k, b_q = tiles_without_time(A, k, q, at, S)
    x = Tokens(q, k, v, delta, value_log_decay, log_decay, beta, b_A, b_k, b_q)
    b_s, b_left = tl.zeros([S.BK, S.BV], tl.float32), tl.full([S.BK, S.BV], 1.0, tl.float32)
    for i_g in range(0, tokens, S.G):
        for j in tl.static_range(S.G):
            t = i_g + j
            here = t < tokens
            if S.REVERSE:
                t = tokens - 1 - t
            b_f, b_new = transition(x, first + t, here, at, S)
            if S.REVERSE:
                b_do = load_values(d_o, first + t, here, at, S) * scale
                b_query = load_key(q, x.b_q, first + t, here, at, S.HQ, S)
                b_s = (b_s + b_do * b_query) * b_f
            else:
                b_s = b_s * b_f + b_new
            b_left *= b_f
    place, mask = state_offsets(i_m, at, S)
    tl.store(local + place, b_s, mask=mask)
    tl.store(left + place, b_left, mask=mask)


@triton.jit(do_not_specialize=["T"])
def carry_kernel(before, local, left, after, cu_seqlens, T, S: tl.constexpr):
    """BE of the SIZE entries of one sequence's state, through its chunks; REVERSE: from the last.

    `local` is replaced by the state at each chunk's start (the gradient at its end), `before`
    [N, SIZE] (None: zeros) is what goes in, and `after` what comes out.
    """
    i_n = tl.program_id(0)
    start, length = sequence_bounds(cu_seqlens, i_n, T, S.PACKED)
    i_m = first_chunk(start, i_n, T, S.CT, S.PACKED).to(tl.int64)
    o_e = tl.program_id(1).to(tl.int64) * S.BE + tl.arange(0, S.BE)
    mask = o_e < S.SIZE
    b_s = tl.zeros([S.BE], tl.float32)
    if before is not None:
        b_s = tl.load(before + i_n.to(tl.int64) * S.SIZE + o_e, mask=mask, other=0.0)
    chunks = tl.cdiv(length, S.CT)
    for i_c in range(0, chunks, AHEAD):
        fetched = ()
        for j in tl.static_range(AHEAD):
            here = i_c + j < chunks
            i_slot = i_m + i_c + j
            if S.REVERSE:
                i_slot = i_m + chunks - 1 - i_c - j
            place = i_slot * S.SIZE + o_e
            b_local = tl.load(local + place, mask=mask & here, other=0.0)
            b_left = tl.load(left + place, mask=mask & here, other=1.0)
            fetched = fetched + (b_local, b_left)  # type: ignore[assignment]  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            i_slot = i_m + i_c + j
            if S.REVERSE:
                i_slot = i_m + chunks - 1 - i_c - j
            tl.store(local + i_slot * S.SIZE + o_e, b_s, mask=mask & (i_c + j < chunks))
            b_s = fetched[2 * j + 1] * b_s + fetched[2 * j]
    tl.store(after + i_n.to(tl.int64) * S.SIZE + o_e, b_s, mask=mask)
