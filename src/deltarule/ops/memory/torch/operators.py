"""`ttt` and `titans` by mini-batches: gradients at one memory, mixed as the operator says.

    ttt:     W_t = W_0 - step_scale_t sum_{i <= t} beta_i grad_i        o_t = q_t + LN(W_t(q_t))
    titans:  S_t = momentum_t S_{t-1} - beta_t grad_t
             M_t = exp(log_decay_t) M_{t-1} + S_t                       o_t = M_t(q_t)

grad_i is that of the loss of token i where the mini-batch starts, at W_0 or at the anchor. The last
W_t of a full mini-batch starts the next. M_t and S_t are sums of M_0, S_0 and the gradients, with
coefficients that follow the same two lines and hold no matrix.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.memory.torch.memory import Memory, Mix, Norm, Steps, centred, loss_gradient, scan
from deltarule.ops.memory.torch.triton_scan import scan_in_triton
from deltarule.ops.mini_batches import MiniBatches, lay_out, next_position
from deltarule.ops.plain import Arguments
from deltarule.shapes import TitansOutput, TTTOutput

# What each token reads, and what both parts of the memory are at the end of the mini-batch.
Mixes = tuple[Mix, Mix, Mix]


def ttt(given: Arguments, backend: str) -> TTTOutput:
    """Outputs and final state, in float32 or float64, of what the operator has checked."""
    dtype = torch.promote_types(given["q"].dtype, torch.float32)
    names = "beta", "step_scale", "norm_weight", "norm_bias"
    beta, step_scale, weight, bias = (given[name].to(dtype) for name in names)

    def mixes(layout: MiniBatches) -> Mixes:
        return ttt_coefficients(layout.cut(beta), step_scale, layout)

    norm = Norm(weight.contiguous(), bias.contiguous(), given["norm_eps"])
    return TTTOutput(*trained(given, len(step_scale), mixes, norm, backend))


def titans(given: Arguments, backend: str) -> TitansOutput:
    """Outputs and final state, in float32 or float64, of what the operator has checked."""
    beta, momentum, log_decay = (given[name] for name in ("beta", "momentum", "log_decay"))
    momentum = torch.zeros_like(beta) if momentum is None else momentum
    log_decay = torch.zeros_like(beta) if log_decay is None else log_decay.expand(beta.shape)
    gates, dtype = (beta, momentum, log_decay), torch.promote_types(given["q"].dtype, torch.float32)

    def mixes(layout: MiniBatches) -> Mixes:
        beta_, momentum_, log_decay_ = (layout.cut(x.to(dtype)) for x in gates)
        return titans_coefficients(beta_, momentum_, log_decay_, layout)

    return TitansOutput(*trained(given, given["mini_batch"], mixes, None, backend))


def trained(
    given: Arguments, size: int, mixes: Callable[[MiniBatches], Mixes], norm: Norm | None,
    backend: str,
) -> tuple[Tensor, Any]:  # fmt: skip
    """o and the final state of mini-batches of `size` tokens, scanned by the backend."""
    q, k, v, state, lengths, cu_seqlens = (
        given[name] for name in ("q", "k", "v", "initial_state", "lengths", "cu_seqlens")
    )
    kind, (*maps, position) = type(state), state
    if q.shape[1] == 0 or q.shape[0] == 0:
        copies = (tuple(x.clone() for x in part) for part in maps)
        return v.clone(), kind(*copies, position.clone())
    dtype, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    layout = lay_out(q, size, position=position, lengths=lengths, cu_seqlens=cu_seqlens)
    q, k, values = (layout.cut(x.to(dtype)) for x in (q, k, v))
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    full = layout.completes(size)[..., None, None, None]
    steps = Steps(q, k, values, *mixes(layout), full)
    # The anchor of `ttt` is W.
    memory = Memory(*maps, *maps[: 3 - len(maps)])
    if backend == "triton":
        z, memory = scan_in_triton(steps, memory, layout, norm)
    else:
        z, memory = scan(steps, memory, layout, loss_gradient(norm))
    if norm is not None:
        weight, bias = (x.unsqueeze(-2) for x in norm[:2])
        z = q + weight * centred(z, norm.eps)[0] + bias
    position = next_position(position, v.shape[1], size, lengths, cu_seqlens)
    return layout.join(z).to(v.dtype), kind(*memory[: len(maps)], position)


def ttt_coefficients(beta: Tensor, step_scale: Tensor, layout: MiniBatches) -> tuple[Mix, Mix, Mix]:
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


def titans_coefficients(
    beta: Tensor, momentum: Tensor, log_decay: Tensor, layout: MiniBatches
) -> tuple[Mix, Mix, Mix]:
    """What each token reads, and what M and S are at the end; empty slots leave both alone.

    S_t = s_t S_0 - sum_i a_ti grad_i                s_t = momentum_t s_{t-1}
    M_t = m_t M_0 + p_t S_0 - sum_i c_ti grad_i      m_t = decay_t m_{t-1}
    a_t = momentum_t a_{t-1} + beta_t e_t            c_t = decay_t c_{t-1} + a_t
                                                     p_t = decay_t p_{t-1} + s_t
    """
    size, decay = beta.shape[-1], log_decay.exp()
    real = layout.real.unsqueeze(2)
    # Columns: M_0, S_0, and the gradients.
    columns = torch.eye(size + 2, dtype=beta.dtype, device=beta.device)
    of_M, of_S = (columns[i].expand(*beta.shape[:-1], size + 2) for i in (0, 1))
    reads = []
    for t in range(size):
        new_S = momentum[..., t, None] * of_S - beta[..., t, None] * columns[t + 2]
        new_M = decay[..., t, None] * of_M + new_S
        of_S = torch.where(real[..., t, None], new_S, of_S)
        of_M = torch.where(real[..., t, None], new_M, of_M)
        reads.append(of_M)
    mixed = torch.stack(reads, dim=-2), of_M.unsqueeze(-2), of_S.unsqueeze(-2)
    to_M, to_all, to_S = (Mix(x[..., :1], x[..., 1:2], -x[..., 2:]) for x in mixed)
    return to_M, to_all, to_S
