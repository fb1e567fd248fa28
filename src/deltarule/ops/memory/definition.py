"""The definition of `ttt`: a network trained on the sequence while it is read.

    f_W(x) = x + LN(W(x))        loss_i = 1/2 |f_W(k_i) - v_i|^2
    W_t = W_0 - step_scale_t sum_{i <= t} beta_i d loss_i / dW (W_0)        o_t = f_{W_t}(q_t)

t counts in mini-batches of C = len(step_scale) tokens; W_0 is the memory before the mini-batch,
W_C that before the next. This is the primal form: every W_t is a matrix, its gradient autograd's.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops.sequences import computed, per_value_head, sequences_of, stack_maps, stack_rows
from deltarule.shapes import TitansOutput, TitansState, TTTOutput, TTTState

Maps = tuple[Tensor, ...]
State = TypeVar("State", TTTState, TitansState)


def ttt(given: Mapping[str, Any]) -> TTTOutput:
    names = "q", "k", "v", "beta", "step_scale", "norm_weight", "norm_bias", "initial_state"
    q, k, v, beta, step_scale, *norm_of, initial_state = (given[name] for name in names)
    heads, size = v.shape[2], len(step_scale)
    q, k = per_value_head(q, heads), per_value_head(k, heads)
    values, beta, step_scale = computed(v), computed(beta, v), computed(step_scale, v)
    norm = computed(norm_of[0], v), computed(norm_of[1], v), given["norm_eps"]

    def loss(maps: Maps, key: Tensor, value: Tensor) -> Tensor:
        return 0.5 * (fitted(maps, key, *norm) - value).square().sum()

    rows, finals = [list[Tensor]() for _ in range(q.shape[0])], []
    for n, (row, start, end) in enumerate(sequences_of(q, given["cu_seqlens"], given["lengths"])):
        W, summed = (tuple(x[n] for x in maps) for maps in initial_state[:2])
        position = int(initial_state.position[n])
        for t in range(start, end):
            gradients = torch.func.grad(loss)(W, k[row, t], values[row, t])
            strength = beta[row, t, :, None, None]
            summed = tuple(s + strength * g for s, g in zip(summed, gradients, strict=True))
            W_t = tuple(w - step_scale[position] * s for w, s in zip(W, summed, strict=True))
            rows[row].append(fitted(W_t, q[row, t], *norm))
            position += 1
            if position == size:
                W, summed, position = W_t, tuple(torch.zeros_like(s) for s in summed), 0
        finals.append((W, summed, position))
    o = stack_rows(rows, values).to(v.dtype)
    return TTTOutput(o, _stack(finals, initial_state))


def fitted(maps: Maps, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x + LN(W(x)) for each head: x [HV, K], maps [HV, outputs, inputs + 1]."""
    z = network(maps, x)
    variance = z.var(-1, unbiased=False, keepdim=True)
    return x + weight * (z - z.mean(-1, keepdim=True)) / torch.sqrt(variance + eps) + bias


def network(maps: Maps, x: Tensor) -> Tensor:
    """One map, or several with GELU between them; a column more than x has channels is a bias."""
    for index, weights in enumerate(maps):
        x = F.gelu(x, approximate="tanh") if index else x
        channels = x.shape[-1]
        x = (weights[..., :channels] @ x.unsqueeze(-1) + weights[..., channels:].sum(-1, True))[
            ..., 0
        ]
    return x


def _stack(finals: list[tuple[Any, ...]], initial_state: State) -> State:
    """The parts of every sequence's memory, and its place in the mini-batch, as one state."""
    if not finals:
        return initial_state
    *maps, position = zip(*finals, strict=True)
    places = torch.tensor(position, device=initial_state.position.device)
    kind: Any = type(initial_state)
    return kind(*map(stack_maps, maps), places)


# The definition of `titans`: a network trained on the sequence with momentum and forgetting.
#
#     S_t = momentum_t S_{t-1} - beta_t d |M(k_t) - v_t|^2 / dM        (the surprise)
#     M_t = exp(log_decay_t) M_{t-1} + S_t        o_t = M_t(q_t)
#
# The gradient is taken at the memory before the token's mini-batch; mini-batches of one token make
# it that before the token.


def titans(given: Mapping[str, Any]) -> TitansOutput:
    names = "q", "k", "v", "beta", "momentum", "log_decay", "initial_state"
    q, k, v, beta, momentum, log_decay, initial_state = (given[name] for name in names)
    heads = v.shape[2]
    q, k = per_value_head(q, heads), per_value_head(k, heads)
    values, beta = computed(v), computed(beta, v)[..., None, None]
    momentum = (
        torch.zeros_like(beta) if momentum is None else computed(momentum, v)[..., None, None]
    )
    decay = torch.ones_like(beta)
    if log_decay is not None:
        decay = computed(log_decay, v).exp().expand(beta.shape[:3])[..., None, None]
    rows, finals = [list[Tensor]() for _ in range(q.shape[0])], []
    for n, (row, start, end) in enumerate(sequences_of(q, given["cu_seqlens"], given["lengths"])):
        M, S, anchor = (tuple(x[n] for x in maps) for maps in initial_state[:3])
        position = int(initial_state.position[n])
        for t in range(start, end):
            gradients = torch.func.grad(loss)(anchor, k[row, t], values[row, t])
            S = tuple(
                momentum[row, t] * s - beta[row, t] * g for s, g in zip(S, gradients, strict=True)
            )
            M = tuple(decay[row, t] * m + s for m, s in zip(M, S, strict=True))
            rows[row].append(network(M, q[row, t]))
            position = (position + 1) % given["mini_batch"]
            anchor = M if position == 0 else anchor
        finals.append((M, S, anchor, position))
    o = stack_rows(rows, values).to(v.dtype)
    return TitansOutput(o, _stack(finals, initial_state))


def loss(maps: Maps, key: Tensor, value: Tensor) -> Tensor:
    return (network(maps, key) - value).square().sum()
