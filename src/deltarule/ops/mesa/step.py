"""A few tokens of `mesa`, one after another, for sums without a gradient.

H <- g_t H + beta_t k_t k_t^T        G <- g_t G + beta_t v_t k_t^T
o_t = scale * G (H + Diag(regularizer))^{-1} q_t
"""

import torch

from deltarule.ops.mesa.torch import Covariance, solved
from deltarule.ops.plain import Arguments
from deltarule.shapes import MesaOutput, MesaState


def mesa_step(given: Arguments, backend: str) -> MesaOutput:
    """Outputs [B, T, HV, V] and new sums; `backend` is that of the conjugate gradients."""
    q, k, v, beta, log_decay = (given[name] for name in ("q", "k", "v", "beta", "log_decay"))
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, tokens, heads, value_size = v.shape
    key_size = q.shape[3]
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    values, weight = v.to(dtype).unsqueeze(-1), beta.to(dtype)[..., None, None]
    decay = None if log_decay is None else log_decay.to(dtype).expand(beta.shape).exp()
    ridge, state = given["regularizer"].to(dtype).unsqueeze(-2), given["initial_state"]
    if state is None:
        sizes = (batch, heads, key_size, key_size), (batch, heads, value_size, key_size)
        state = MesaState(*(q.new_zeros(size) for size in sizes))
    (H, G), outputs, one = state, [], q.new_ones(1).expand(batch, 1, heads, 1, 1)
    for t in range(tokens):
        if decay is not None:
            H, G = (x * decay[:, t, :, None, None] for x in (H, G))
        key = k[:, t].unsqueeze(-2)
        written = weight[:, t] * key
        H = torch.addcmul(H, key.mT, written)
        G = torch.addcmul(G, values[:, t], written)
        # A chunk of one token, whose key H holds already.
        of_key = key.unsqueeze(1), torch.zeros_like(one), one, H.unsqueeze(1), ridge
        query = q[:, t, :, None].unsqueeze(1)
        x = solved(Covariance(*of_key), query, given["iterations"], backend)
        outputs.append((G @ x[:, 0].mT).squeeze(-1))
    o = torch.stack(outputs, dim=1) * given["scale"]
    return MesaOutput(o.to(v.dtype), MesaState(H, G))
