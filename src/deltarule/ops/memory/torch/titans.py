"""`titans` by mini-batches: momentum and forgetting between gradients of one anchor.

    S_t = momentum_t S_{t-1} - beta_t grad_t        grad_t = d |M(k_t) - v_t|^2 / dM at the anchor
    M_t = exp(log_decay_t) M_{t-1} + S_t            o_t = M_t(q_t)

M_t and S_t are sums of M_0, S_0 and the gradients, with coefficients that follow the same two lines
and hold no matrix.
"""

import torch
from torch import Tensor

from deltarule.ops.memory.torch.memory import Memory, Mix, Steps, cloned, scan
from deltarule.ops.memory.torch.triton_scan import scan_in_triton
from deltarule.ops.mini_batches import MiniBatches, lay_out, next_position
from deltarule.shapes import TitansOutput, TitansState


def titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    momentum: Tensor | None,
    log_decay: Tensor | None,
    mini_batch: int,
    initial_state: TitansState,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str = "torch",
) -> TitansOutput:
    """Outputs and final state, in float32 or float64; see the definition in the reference.

    `backend` is that of the scan over mini-batches, "torch" or, for one map or two, "triton".
    """
    dtype, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    weights, surprise, anchor, position = initial_state
    if q.shape[1] == 0 or q.shape[0] == 0:
        maps = cloned(weights), cloned(surprise), cloned(anchor)
        return TitansOutput(torch.zeros_like(v), TitansState(*maps, position.clone()))
    layout = lay_out(q, mini_batch, position=position, lengths=lengths, cu_seqlens=cu_seqlens)
    q, k, values = (layout.cut(x.to(dtype)) for x in (q, k, v))
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    momentum = torch.zeros_like(beta) if momentum is None else momentum
    log_decay = torch.zeros_like(beta) if log_decay is None else log_decay.expand(beta.shape)
    beta, momentum, log_decay = (layout.cut(x.to(dtype)) for x in (beta, momentum, log_decay))
    mixes = coefficients(beta, momentum, log_decay, layout)
    steps = Steps(q, k, values, *mixes, layout.completes(mini_batch)[..., None, None, None])
    memory = Memory(weights, surprise, anchor)
    if backend == "triton":
        z, memory = scan_in_triton(steps, memory, layout, None)
    else:
        # The gradient of |z - v|^2 by z.
        z, memory = scan(steps, memory, layout, lambda z, k, v: 2 * (z - v))
    position = next_position(position, v.shape[1], mini_batch, lengths, cu_seqlens)
    return TitansOutput(layout.join(z).to(v.dtype), TitansState(*memory, position))


def coefficients(
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
    return _mix(torch.stack(reads, dim=-2)), _mix(of_M.unsqueeze(-2)), _mix(of_S.unsqueeze(-2))


def _mix(columns: Tensor) -> Mix:
    return Mix(columns[..., :1], columns[..., 1:2], -columns[..., 2:])
