"""A few tokens of `selective_scan`, one after another, for a state without a gradient.

S <- S * exp(delta_t A + value_log_decay_t 1^T + 1 log_decay_t^T) * (1 - beta_t k_t^2^T) + w_t k_t^T
o_t = scale * S_t q_t        w_t = v_t or beta_t * v_t
"""

import torch
from torch import Tensor

from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.shapes import RecurrentOutput


def step(inputs: ScanInputs) -> RecurrentOutput:
    """Outputs [B, T, HV, V], and a new state [B, HV, V, K]."""
    v, beta, dtype, outputs = inputs.v, inputs.beta, inputs.dtype, []
    with torch.autocast(v.device.type, enabled=False):
        queries, keys = (of_tokens(x, v, dtype) for x in (inputs.q, inputs.k))
        state = inputs.initial_state
        if state is None:
            state = v.new_zeros(inputs.state_shape, dtype=dtype)
        for t in range(v.shape[1]):
            key, write = keys[t], v[:, t].to(dtype).unsqueeze(-1)
            decay = decay_of(inputs, t)
            if beta is not None:
                strength = beta[:, t].to(dtype).unsqueeze(-1)
                kept = 1 - strength * key.square()
                decay, write = kept if decay is None else decay * kept, strength * write
            state = torch.addcmul(state if decay is None else state * decay, write, key)
            outputs.append((state * queries[t]).sum(-1))
        o = torch.stack(outputs, dim=1) * inputs.scale
        return RecurrentOutput(o.to(v.dtype), state)


def decay_of(inputs: ScanInputs, t: int) -> Tensor | None:
    """What token t leaves of each entry, [B, HV, V or 1, K or 1]; None where it leaves all."""
    logs = []
    if inputs.delta is not None and inputs.A is not None:
        logs.append(inputs.delta[:, t].to(inputs.dtype).unsqueeze(-1) * inputs.A.to(inputs.dtype))
    if inputs.value_log_decay is not None:
        logs.append(inputs.value_log_decay[:, t].to(inputs.dtype).unsqueeze(-1))
    if inputs.log_decay is not None:
        logs.append(inputs.log_decay[:, t].to(inputs.dtype).unsqueeze(-2))
    if not logs:
        return None
    decay = sum(logs[1:], logs[0]).exp()
    return 2 * decay - 1 if inputs.signed else decay


def of_tokens(x: Tensor, v: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Queries or keys of each token, [B or 1, HV, 1, K], or [1, HV, V, K] where constant."""
    x = x.to(dtype)
    if x.ndim == 3:
        return [x.unsqueeze(0)] * v.shape[1]
    return list(x.repeat_interleave(v.shape[2] // x.shape[2], dim=2).unsqueeze(-2).unbind(1))
