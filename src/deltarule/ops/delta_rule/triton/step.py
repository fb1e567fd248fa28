"""A few tokens for each of many states, each state read once and written once.

    S <- S Diag(decay_t)        S <- S + beta_j (v_j - S k_j) k_j^T        o_t = scale * S q_t

or, with a free erase, S <- S Diag(decay_t) + (S a_t) b_t^T + v_t k_t^T. A program keeps BV rows of
one head's state in registers while it goes through the tokens, so that the time is that of moving
the state: 2 * HV * V * K * 4 bytes for each batch row. Gates may come as logits:

    log_decay = -exp(A_log) * softplus(logits + dt_bias)        beta = beta_max * sigmoid(logits)
    log_decay = lower_bound * sigmoid(exp(A_log) * (logits + dt_bias))

A server's rows have different lengths, and a slot for the state after each drafted token.
"""

from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.gate_logits import Step
from deltarule.ops.delta_rule.triton.tiles import EPSILON
from deltarule.ops.fused.gates_triton import softplus
from deltarule.ops.runtime.chained import begin, follow, following, read_early, wait_for_last
from deltarule.ops.runtime.launch import Launch, multiprocessors
from deltarule.ops.runtime.places import place_of
from deltarule.ops.runtime.sizes import power_of_2

# Rows of the state in a program of one warp, whose loads all come before its first sum. With more
# than HELD programs a multiprocessor, 8 rows of float32 keep more bytes on their way at once, if a
# token writes once.
FEW, MANY, HELD = 4, 8, 64


@triton.jit
def decay_of(log_decay, o_g, mask, A_log, i_h, dt_bias, o_bias, lower_bound, LOGITS: tl.constexpr):
    """exp(log_decay) of one token: a number, or one for each channel."""
    b_g = tl.load(log_decay + o_g, mask=mask, other=0.0).to(tl.float32)
    if LOGITS != "none":
        b_bias = tl.load(dt_bias + o_bias, mask=mask, other=0.0).to(tl.float32)
        b_rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
        if LOGITS == "bounded":
            b_g = lower_bound * tl.sigmoid(b_rate * (b_g + b_bias))
        else:
            b_dt, _ = softplus(b_g + b_bias)
            b_g = -b_rate * b_dt
    return tl.exp(b_g)


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sums_of(b_s, b_q, b_k, UNIT_NORM: tl.constexpr):
    """S k, S q, q . k, and 1 / |q| and 1 / |k|, or ones: no sum waits for another."""
    b_qq, b_kk, b_qk = tl.reduce((b_q * b_q, b_k * b_k, b_q * b_k), 0, add_three)
    b_sk, b_sq = tl.reduce((b_s * b_k[None, :], b_s * b_q[None, :]), 1, add_two)
    norm_q, norm_k = 1.0, 1.0
    if UNIT_NORM:
        norm_q, norm_k = tl.rsqrt(b_qq + EPSILON), tl.rsqrt(b_kk + EPSILON)
    return b_sk, b_sq, b_qk, norm_q, norm_k


@triton.jit
def keys_and_values(k, v, step, s_k_t, s_v_t, o_k, o_v, m_k, m_v):
    """k and rows of v of one write."""
    b_k = tl.load(k + step * s_k_t + o_k, mask=m_k, other=0.0).to(tl.float32)
    return b_k, tl.load(v + step * s_v_t + o_v, mask=m_v, other=0.0).to(tl.float32)


# A single token is worth a kernel of its own; an index is not.
@triton.jit(do_not_specialize=["null_index"])
def recurrent_step_kernel(
    q, k, v, beta, a, b, log_decay, A_log, dt_bias, state, state_indices, states, o, cu_seqlens,
    accepted, scale, beta_max, lower_bound, null_index, T,
    s_q_b, s_q_t, s_q_h, s_k_b, s_k_t, s_k_h, s_v_b, s_v_t, s_v_h,
    s_beta_b, s_beta_t, s_beta_h, s_a_b, s_a_t, s_a_h, s_b_b, s_b_t, s_b_h,
    s_decay_b, s_decay_t, s_decay_h, s_state_n, s_state_h, s_state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N_STEPS: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, UNIT_NORM: tl.constexpr, INDEXED: tl.constexpr,
    DECAY_LOGITS: tl.constexpr, BETA_LOGITS: tl.constexpr, KEPT: tl.constexpr,
    SLOTS: tl.constexpr, BELOW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHAINED: tl.constexpr, FOLLOWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head of one batch row; s_x_b, s_x_t, s_x_h are strides of x.

    SLOTS: slots of a row, one for each token; 0: one for the row. BELOW: any index below
    null_index is null too. EARLY: the state is read before what the kernel waits for.
    """
    begin(CHAINED, EARLY)
    follow(FOLLOWS)
    i_v, i_h, i_b = place_of((V + BV - 1) // BV, HV)
    i_b = i_b.to(tl.int64)
    i_key = i_h // (HV // H)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    row, first = i_b, 0
    if cu_seqlens is not None:
        row, first = 0, tl.load(cu_seqlens + i_b).to(tl.int64)
        T = (tl.load(cu_seqlens + i_b + 1) - first).to(tl.int32)
    p_o = o + ((row * T + first) * HV + i_h) * V + o_v
    slot = i_b
    if INDEXED:
        p_i = state_indices + i_b * max(SLOTS, 1)
        i_t = 0 if accepted is None else tl.load(accepted + i_b) - 1
        slot = tl.load(p_i + i_t).to(tl.int64)
        null = slot <= null_index if BELOW else slot == null_index
        if null:
            for t in range(T):
                tl.store(p_o + t * HV * V, tl.zeros([BV], o.dtype.element_ty), mask=m_v)
            return
    p_h = state + i_h * s_state_h + o_v[:, None] * s_state_v + o_k[None, :]
    p_s = p_h + slot * s_state_n
    m_s = m_v[:, None] & m_k[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    q += row * s_q_b + first * s_q_t + i_key * s_q_h
    k += row * s_k_b + first * N_STEPS * s_k_t + i_key * s_k_h
    v += row * s_v_b + first * N_STEPS * s_v_t + i_h * s_v_h
    for t in range(T):
        # All that sums take comes before the first of them: one wait for memory, not several.
        b_q = tl.load(q + t * s_q_t + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k, b_w = keys_and_values(k, v, t * N_STEPS, s_k_t, s_v_t, o_k, o_v, m_k, m_v)
        o_beta = row * s_beta_b + (first + t) * N_STEPS * s_beta_t + i_h * s_beta_h
        if ERASE == "tied":
            b_beta = tl.load(beta + o_beta).to(tl.float32)
        # The free erase reads the state before its decay.
        if ERASE == "free":
            p_a = a + row * s_a_b + (first + t) * s_a_t + i_h * s_a_h
            b_a = tl.load(p_a + o_k, mask=m_k, other=0.0)
            p_b = b + row * s_b_b + (first + t) * s_b_t + i_h * s_b_h
            b_b = tl.load(p_b + o_k, mask=m_k, other=0.0)
            b_read = tl.sum(b_s * b_a.to(tl.float32)[None, :], axis=1)
        o_g = row * s_decay_b + (first + t) * s_decay_t + i_h * s_decay_h
        if DECAY == "head":
            b_s *= decay_of(
                log_decay, o_g, True, A_log, i_h, dt_bias, i_h, lower_bound, DECAY_LOGITS
            )
        if DECAY == "channel":
            o_c = i_h * K + o_k
            b_decay = decay_of(
                log_decay, o_g + o_k, m_k, A_log, i_h, dt_bias, o_c, lower_bound, DECAY_LOGITS
            )
            b_s *= b_decay[None, :]
        if ERASE == "free":
            b_s += b_read[:, None] * b_b.to(tl.float32)[None, :]
        for j in tl.static_range(N_STEPS):
            if j > 0:
                b_k, b_w = keys_and_values(k, v, t * N_STEPS + j, s_k_t, s_v_t, o_k, o_v, m_k, m_v)
                if ERASE == "tied":
                    b_beta = tl.load(beta + o_beta + j * s_beta_t).to(tl.float32)
            if BETA_LOGITS:
                b_beta = beta_max * tl.sigmoid(b_beta)
            b_erased, b_o, b_qk, norm_q, norm_k = sums_of(b_s, b_q, b_k, UNIT_NORM)
            if ERASE == "tied":
                b_w = b_beta * (b_w - b_erased * norm_k)
            b_w *= norm_k
            b_s += b_w[:, None] * b_k[None, :]
        b_o = (b_o + b_w * b_qk) * (norm_q * scale)
        tl.store(p_o + t * HV * V, b_o.to(o.dtype.element_ty), mask=m_v)
        if KEPT:
            p_t = states + (((i_b * T + t) * HV + i_h) * V + o_v[:, None]) * K + o_k[None, :]
            tl.store(p_t, b_s.to(states.dtype.element_ty), mask=m_s)
        if SLOTS > 0:
            i_w = tl.load(p_i + t, mask=t < SLOTS, other=null_index).to(tl.int64)
            p_w = p_h + i_w * s_state_n
            tl.store(p_w, b_s.to(state.dtype.element_ty), mask=m_s & (i_w > null_index))
    if SLOTS == 0:
        tl.store(p_s, b_s.to(state.dtype.element_ty), mask=m_s)


def recurrent_step(step: Step) -> Tensor:
    """Outputs; a row without a slot gives zeros."""
    inputs, maps, state, indices, null_index, states, accepted, o = step
    batch, tokens, value_heads, value_size = inputs.output_shape
    q, k, v, a, b = (_adjacent(x) for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))
    log_decay = _adjacent(inputs.log_decay) if inputs.decay == "channel" else inputs.log_decay
    below, cu_seqlens = o is not None, inputs.cu_seqlens
    if o is None:
        o = torch.empty(inputs.output_shape, dtype=inputs.v.dtype, device=inputs.v.device)
    if cu_seqlens is not None:
        batch, cu_seqlens = len(cu_seqlens) - 1, cu_seqlens.to(state.device)
    slots = 0 if indices is None or indices.ndim == 1 else indices.shape[1]
    streams = (q, k, v, inputs.beta, a, b, log_decay)
    A_log, dt_bias = (None if x is None else x.contiguous() for x in maps[:2])
    beta_max = 1.0 if maps.beta_max is None else maps.beta_max
    lower_bound = 0.0 if maps.lower_bound is None else maps.lower_bound
    form = "none" if A_log is None else "bounded" if lower_bound else "softplus"
    sizes = *inputs.q.shape[2:], value_heads, value_size, inputs.n_steps
    rule = inputs.decay, inputs.erase, inputs.normalize_qk, form, maps.beta_max is not None
    places = indices is not None, states is not None, slots, below
    programs = -(-value_size // FEW) * value_heads * batch
    # Tiles of fewer keys, and what a free erase adds, are summed in another order with more rows.
    alike = inputs.erase != "free" and inputs.q.shape[3] > 16
    single = alike and inputs.n_steps == 1 and state.dtype.itemsize == 4
    many = single and programs > HELD * multiprocessors(state.device)
    values = *sizes, *rule, *places, (rows := MANY if many else FEW)
    early = indices is None and cu_seqlens is None and read_early(state)
    starts = following(state.device) | {"EARLY": early}
    kernel = step_launch(inputs.q.device, values, tuple(starts.items()))
    grid = -(-value_size // rows) * value_heads * batch, 1, 1
    tensors = *streams, A_log, dt_bias, state, indices, states, o, cu_seqlens, accepted
    numbers = inputs.scale, beta_max, lower_bound, null_index, tokens
    strides = chain.from_iterable((0, 0, 0) if x is None else x.stride()[:3] for x in streams)
    kernel(grid, *tensors, *numbers, *strides, *state.stride()[:3])
    return o


# Sizes; the rule, which map makes the decay of logits, and whether beta is made of them; whether
# states have slots, whether that after each token is kept, how many slots a row has if its tokens
# have them, and whether null_index is the last of many; rows of the state in a program.
CONSTANTS = (
    *("H", "K", "HV", "V", "N_STEPS"),
    *("DECAY", "ERASE", "UNIT_NORM", "DECAY_LOGITS", "BETA_LOGITS"),
    *("INDEXED", "KEPT", "SLOTS", "BELOW"),
    "BV",
)


@lru_cache(maxsize=256)
def step_launch(
    device: torch.device, values: tuple[Any, ...], chained: tuple[tuple[str, bool], ...]
) -> Launch:
    """The kernel with its CONSTANTS: one for all calls on a device that share their values."""
    constants = dict(zip(CONSTANTS, values, strict=True))
    constants |= {"BK": power_of_2(constants["K"]), "num_warps": 1, "num_stages": 1}
    return Launch(recurrent_step_kernel, constants | dict(chained))


def _adjacent(x: Tensor | None) -> Tensor | None:
    """The tensor, or a copy in which the channels of a row follow each other."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()
