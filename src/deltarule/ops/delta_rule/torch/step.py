"""A few tokens for each of many states, each state updated in place.

    S <- S Diag(decay_t)        S <- S + beta_j (v_j - S k_j) k_j^T        o_t = scale * S q_t

or, with a free erase, S <- S Diag(decay_t) + (S a_t) b_t^T + v_t k_t^T.
"""

import torch
from torch import Tensor

from deltarule.ops.autocast import without_autocast
from deltarule.ops.delta_rule.gate_maps import NO_MAPS, GateMaps
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch.layout import unit_norm


def recurrent_step(
    inputs: Inputs,
    state: Tensor,
    state_indices: Tensor | None,
    null_index: int,
    maps: GateMaps = NO_MAPS,
    states: Tensor | None = None,
) -> Tensor:
    """Row i reads and writes state[state_indices[i]]; rows with null_index give zeros.

    `states` [B, T, HV, V, K], if given, takes the state after each token.
    """
    with without_autocast(state.device):
        inputs = maps.applied(inputs)
        if state_indices is None:
            o, after = _tokens(inputs, state.to(inputs.dtype))
            state.copy_(after[-1])
            if states is not None:
                states.copy_(torch.stack(after, dim=1))
            return o
        rows = (state_indices != null_index).nonzero().squeeze(-1)
        slots = state_indices[rows].long()
        picked = inputs.rows(rows)
        o = inputs.v.new_zeros(inputs.output_shape)
        o[rows], after = _tokens(picked, state[slots].to(inputs.dtype))
        state[slots] = after[-1].to(state.dtype)
        if states is not None:
            states[rows] = torch.stack(after, dim=1).to(state.dtype)
        return o


def _tokens(inputs: Inputs, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs [B, T, HV, V] and the state [B, HV, V, K] after each token."""
    heads, n_steps = inputs.v.shape[2], inputs.n_steps
    q, k = inputs.q.to(inputs.dtype), inputs.k.to(inputs.dtype)
    if inputs.normalize_qk:
        q, k = unit_norm(q), unit_norm(k)
    # [B, T, HV, 1, K]: a row vector for each head, to multiply a state from the right.
    q, k = (x.repeat_interleave(heads // x.shape[2], 2).unsqueeze(-2) for x in (q, k))
    v = inputs.v.to(inputs.dtype).unsqueeze(-1)
    outputs, after = [], []
    for t in range(q.shape[1]):
        erase = None
        if inputs.a is not None and inputs.b is not None:
            a, b = (x[:, t].to(inputs.dtype).unsqueeze(-2) for x in (inputs.a, inputs.b))
            erase = (state * a).sum(-1, keepdim=True) * b
        if inputs.log_decay is not None:
            log_decay = inputs.log_decay[:, t].to(inputs.dtype)
            state = state * log_decay.reshape(*log_decay.shape[:2], 1, -1).exp()
        if erase is not None:
            state = state + erase
        for row in range(t * n_steps, (t + 1) * n_steps):
            write = v[:, row]
            if inputs.beta is not None:
                held = (state * k[:, row]).sum(-1, keepdim=True)
                write = inputs.beta[:, row, :, None, None].to(inputs.dtype) * (write - held)
            state = state + write * k[:, row]
        outputs.append((state * q[:, t]).sum(-1) * inputs.scale)
        after.append(state)
    return torch.stack(outputs, 1).to(inputs.v.dtype), after
