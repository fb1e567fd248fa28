"""`ttt` by mini-batches, in the dual form.

    W_t = W_0 - step_scale_t sum_{i <= t} beta_i grad_i        grad_i = d loss_i / dW at W_0
    o_t = q_t + LN(W_t(q_t))

W_0 is the memory at the start of the mini-batch, and the last W_t of a full one starts the next.
"""

import torch
from torch import Tensor

from deltarule.ops.memory.torch.memory import LossGradient, Memory, Mix, Steps, cloned, scan
from deltarule.ops.memory.torch.triton_scan import Norm, scan_in_triton
from deltarule.ops.mini_batches import MiniBatches, lay_out, next_position
from deltarule.shapes import TTTOutput, TTTState


def ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    step_scale: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_eps: float,
    initial_state: TTTState,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str = "torch",
) -> TTTOutput:
    """Outputs and final state, in float32 or float64; see the definition in the reference.

    `backend` is that of the scan over mini-batches, "torch" or, for one map or two, "triton".
    """
    dtype, size, heads = torch.promote_types(q.dtype, torch.float32), len(step_scale), v.shape[2]
    weights, gradients, position = initial_state
    if q.shape[1] == 0 or q.shape[0] == 0:
        state = TTTState(cloned(weights), cloned(gradients), position.clone())
        return TTTOutput(torch.zeros_like(v), state)
    layout = lay_out(q, size, position=position, lengths=lengths, cu_seqlens=cu_seqlens)
    q, k, values = (layout.cut(x.to(dtype)) for x in (q, k, v))
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    mixes = coefficients(layout.cut(beta.to(dtype)), step_scale.to(dtype), layout)
    full = layout.completes(size)[..., None, None, None]
    weight, bias = (x.to(dtype).unsqueeze(-2) for x in (norm_weight, norm_bias))
    steps, memory = Steps(q, k, values, *mixes, full), Memory(weights, gradients, weights)
    if backend == "triton":
        norm = Norm(weight.squeeze(-2).contiguous(), bias.squeeze(-2).contiguous(), norm_eps)
        z, memory = scan_in_triton(steps, memory, layout, norm)
    else:
        loss_gradient = layer_norm_loss_gradient(weight, bias, norm_eps)
        z, memory = scan(steps, memory, layout, loss_gradient)
    o = q + weight * centred(z, norm_eps)[0] + bias
    position = next_position(position, v.shape[1], size, lengths, cu_seqlens)
    state = TTTState(memory.weights, memory.momentum, position)
    return TTTOutput(layout.join(o).to(v.dtype), state)


def coefficients(beta: Tensor, step_scale: Tensor, layout: MiniBatches) -> tuple[Mix, Mix, Mix]:
    """What each token reads, and what W and the sum of gradients are at the end.

    Token t reads W - step_scale_t (M + sum_{i <= t} beta_i grad_i). A full mini-batch leaves its
    last memory and no sum; an open one leaves W as it was, and adds to the sum.
    """
    size = beta.shape[-1]
    full = layout.completes(len(step_scale))[..., None, None, None].to(beta.dtype)
    scale = step_scale[layout.within][:, :, None, :, None]
    one = torch.ones_like(beta[..., :1, None])
    writes = beta.unsqueeze(-2)
    seen = torch.ones(size, size, dtype=beta.dtype, device=beta.device).tril()
    reads = Mix(one.expand_as(scale.expand(*beta.shape, 1)), -scale, scale * writes * seen)
    last = full * step_scale[-1]
    next_weights = Mix(one, -last, last * writes)
    next_gradients = Mix(torch.zeros_like(one), 1 - full, (full - 1) * writes)
    return reads, next_weights, next_gradients


def layer_norm_loss_gradient(weight: Tensor, bias: Tensor, eps: float) -> LossGradient:
    """d/dz of 1/2 |k + LN(z) - v|^2.

    with c = (z - mean) / std and e = weight (LN(z) + k - v):
    dz = (e - mean(e) - c mean(e c)) / std
    """

    def gradient(z: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c, inverse_std = centred(z, eps)
        e = weight * (weight * c + bias + k - v)
        return inverse_std * (e - e.mean(-1, keepdim=True) - c * (e * c).mean(-1, keepdim=True))

    return gradient


def centred(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(z - mean) / sqrt(variance + eps), and that factor."""
    z = z - z.mean(-1, keepdim=True)
    inverse_std = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return z * inverse_std, inverse_std
