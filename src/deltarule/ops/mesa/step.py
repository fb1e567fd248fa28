"""A few tokens of `mesa`, one after another, for sums without a gradient.

H <- g_t H + beta_t k_t k_t^T        G <- g_t G + beta_t v_t k_t^T
o_t = scale * G (H + Diag(regularizer))^{-1} q_t
"""

import torch
from torch import Tensor

from deltarule.ops.mesa.torch import Covariance, solved
from deltarule.shapes import MesaOutput, MesaState


def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    regularizer: Tensor,
    log_decay: Tensor | None,
    iterations: int | None,
    scale: float,
    initial_state: MesaState | None,
    backend: str,
) -> MesaOutput:
    """Outputs [B, T, HV, V] and new sums; `backend` is that of the conjugate gradients."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, tokens, heads, value_size = v.shape
    key_size = q.shape[3]
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    values, weight = v.to(dtype).unsqueeze(-1), beta.to(dtype)[..., None, None]
    decay = None if log_decay is None else log_decay.to(dtype).expand(beta.shape).exp()
    ridge = regularizer.to(dtype).unsqueeze(-2)
    if initial_state is None:
        sizes = (batch, heads, key_size, key_size), (batch, heads, value_size, key_size)
        initial_state = MesaState(*(q.new_zeros(size) for size in sizes))
    (H, G), outputs = initial_state, []
    for t in range(tokens):
        if decay is not None:
            H, G = (x * decay[:, t, :, None, None] for x in (H, G))
        key = k[:, t].unsqueeze(-2)
        written = weight[:, t] * key
        H = torch.addcmul(H, key.mT, written)
        G = torch.addcmul(G, values[:, t], written)
        x = solved(covariance_of(H, key, ridge), q[:, t, :, None].unsqueeze(1), iterations, backend)
        outputs.append((G @ x[:, 0].mT).squeeze(-1))
    o = torch.stack(outputs, dim=1) * scale
    return MesaOutput(o.to(v.dtype), MesaState(H, G))


def covariance_of(H: Tensor, key: Tensor, ridge: Tensor) -> Covariance:
    """H + Diag(regularizer), as that of a chunk of one token whose key H holds already."""
    one = H.new_ones(1).expand(H.shape[0], 1, H.shape[1], 1, 1)
    return Covariance(key.unsqueeze(1), torch.zeros_like(one), one, H.unsqueeze(1), ridge)
