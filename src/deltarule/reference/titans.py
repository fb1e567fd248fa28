"""The definition of `titans`: a network trained on the sequence with momentum and forgetting.

    S_t = momentum_t S_{t-1} - beta_t d |M(k_t) - v_t|^2 / dM        (the surprise)
    M_t = exp(log_decay_t) M_{t-1} + S_t        o_t = M_t(q_t)

The gradient is taken at the memory before the token's mini-batch; mini-batches of one token make it
that before the token.
"""

import torch
from torch import Tensor

from deltarule.reference.sequences import (
    computed,
    per_value_head,
    sequences_of,
    stack_maps,
    stack_rows,
)
from deltarule.reference.ttt import Maps, network
from deltarule.shapes import Offsets, TitansOutput, TitansState


def titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    momentum: Tensor | None = None,
    log_decay: Tensor | None = None,
    mini_batch: int = 16,
    initial_state: TitansState,
    lengths: Tensor | None = None,
    cu_seqlens: Offsets | None = None,
) -> TitansOutput:
    """Run along each sequence, token by token."""
    heads = v.shape[2]
    q, k = per_value_head(q, heads), per_value_head(k, heads)
    values, beta = computed(v), computed(beta)[..., None, None]
    momentum = torch.zeros_like(beta) if momentum is None else computed(momentum)[..., None, None]
    decay = torch.ones_like(beta)
    if log_decay is not None:
        decay = computed(log_decay).exp().expand(beta.shape[:3])[..., None, None]
    rows, finals = [list[Tensor]() for _ in range(q.shape[0])], []
    for n, (row, start, end) in enumerate(sequences_of(q, cu_seqlens, lengths)):
        M, S, anchor = (tuple(x[n] for x in maps) for maps in initial_state[:3])
        position = int(initial_state.position[n])
        for t in range(start, end):
            gradients = torch.func.grad(loss)(anchor, k[row, t], values[row, t])
            S = tuple(
                momentum[row, t] * s - beta[row, t] * g for s, g in zip(S, gradients, strict=True)
            )
            M = tuple(decay[row, t] * m + s for m, s in zip(M, S, strict=True))
            rows[row].append(network(M, q[row, t]))
            position = (position + 1) % mini_batch
            anchor = M if position == 0 else anchor
        finals.append((M, S, anchor, position))
    o = stack_rows(rows, values).to(v.dtype)
    return TitansOutput(o, _stack(finals, initial_state))


def loss(maps: Maps, key: Tensor, value: Tensor) -> Tensor:
    """|M(k) - v|^2."""
    return (network(maps, key) - value).square().sum()


def _stack(finals: list[tuple[Maps, Maps, Maps, int]], initial_state: TitansState) -> TitansState:
    if not finals:
        return initial_state
    weights, momentum, anchor, position = zip(*finals, strict=True)
    places = torch.tensor(position, device=initial_state.position.device)
    return TitansState(stack_maps(weights), stack_maps(momentum), stack_maps(anchor), places)
