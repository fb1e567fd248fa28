"""A few tokens for each of many states, each state updated in place.

    S <- S Diag(decay_t)        S <- S + beta_j (v_j - S k_j) k_j^T        o_t = scale * S q_t

or, with a free erase, S <- S Diag(decay_t) + (S a_t) b_t^T + v_t k_t^T.
"""

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gate_logits import Step
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch.passes import unit_norm
from deltarule.ops.dispatch import without_autocast
from deltarule.ops.sequences import computed


def recurrent_step(step: Step) -> Tensor:
    """Outputs; a row without a slot gives zeros."""
    state, states = step.state, step.states
    with without_autocast(state.device):
        inputs = step.maps.applied(step.inputs)
        if step.slots is None:
            return _within(inputs, state, states)
        rows = (step.slots != step.null_index).nonzero().squeeze(-1)
        slots = step.slots[rows].long()
        picked, own = inputs.each(lambda x, _: x[rows]), state[slots]
        kept = None if states is None else states[rows]
        o = inputs.v.new_zeros(inputs.output_shape)
        o[rows] = _within(picked, own, kept)
        state[slots] = own
        if states is not None and kept is not None:
            states[rows] = kept
        return o


def _within(inputs: Inputs, given: Tensor, states: Tensor | None) -> Tensor:
    """Outputs [B, T, HV, V]; a state of any dtype is overwritten, and kept after each token."""
    state = given.to(inputs.dtype)
    heads, n_steps = inputs.v.shape[2], inputs.n_steps
    q, k, v = (computed(x, inputs.q) for x in inputs[:3])
    gates = (None if x is None else computed(x, inputs.q) for x in inputs[3:7])
    beta, a, b, log_decay = gates
    if inputs.normalize_qk:
        # Of both at once: a norm is five operations, each dearer than rows of a few tokens.
        rows = [q.shape[1], k.shape[1]]
        q, k = unit_norm(torch.cat([q, k], 1)).split_with_sizes(rows, 1)
    if (group := heads // q.shape[2]) > 1:
        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    # [B, T, HV, 1, K]: a row vector for each head, to multiply a state from the right.
    q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-1)
    if beta is not None:
        beta = beta[..., None, None]
    if log_decay is not None:
        # [B, T, HV] of heads or [B, T, HV, K] of channels, to [B, T, HV, 1, 1 or K].
        decay = log_decay.exp()
        decay = (decay.unsqueeze(-1) if decay.ndim == 3 else decay).unsqueeze(-2)
    outputs = []
    for t in range(q.shape[1]):
        erase = None
        if a is not None and b is not None:
            erase = (state * a[:, t].unsqueeze(-2)).sum(-1, keepdim=True), b[:, t].unsqueeze(-2)
        if log_decay is not None:
            state *= decay[:, t]
        if erase is not None:
            state.addcmul_(*erase)
        for row in range(t * n_steps, (t + 1) * n_steps):
            key, write = k[:, row], v[:, row]
            if beta is not None:
                write = beta[:, row] * (write - (state * key).sum(-1, keepdim=True))
            state.addcmul_(write, key)
        outputs.append((state * q[:, t]).sum(-1) * inputs.scale)
        if states is not None:
            states[:, t] = state
    if state is not given:
        given.copy_(state)
    o = outputs[0].unsqueeze(1) if len(outputs) == 1 else torch.stack(outputs, 1)
    return o.to(inputs.v.dtype)
