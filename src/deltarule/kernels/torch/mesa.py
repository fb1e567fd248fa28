"""`mesa` by chunks: no K x K matrix for a token, only one for the start of each chunk.

With start_i the decay from the chunk's start to token i, and between_ij that from token j to i,

    H_i x = start_i H_0 x + sum_{j <= i} between_ij beta_j (k_j . x) k_j
    G_i x = start_i G_0 x + sum_{j <= i} between_ij beta_j (k_j . x) v_j

so a step of the conjugate gradients for all tokens of all chunks is four matrix products.

The solver, and its gradient, are in mesa_solution.py.
"""

import torch
from torch import Tensor

from deltarule.kernels.torch.chunks import chunk_size
from deltarule.kernels.torch.mesa_solution import Covariance, solve
from deltarule.kernels.torch.mini_batches import MiniBatches, lay_out
from deltarule.shapes import MesaOutput, MesaState


def mesa(
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
    cu_seqlens: Tensor | None,
    backend: str = "torch",
) -> MesaOutput:
    """Outputs and final state, in float32 or float64; see the definition in the reference.

    `backend` is that of the conjugate gradients, "torch" or "triton".
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, tokens, _, key_size = q.shape
    heads = v.shape[2]
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    table = _initial(
        initial_state,
        q.new_zeros(sequences, heads, key_size, key_size, dtype=dtype),
        q.new_zeros(sequences, heads, v.shape[3], key_size, dtype=dtype),
    )
    if tokens == 0 or batch == 0:
        return MesaOutput(v.new_zeros(batch, tokens, *v.shape[2:]), _split(table, key_size))
    chunks = lay_out(
        q, chunk_size(-(-tokens * batch // max(sequences, 1)), 1), cu_seqlens=cu_seqlens
    )
    q, k, values = (chunks.cut(x.to(dtype)) for x in (q, k, v))
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    start, between, end = decays(log_decay, beta, chunks, dtype)
    beta = chunks.cut(beta.to(dtype))
    states, table = chunk_states(k, values, beta, start, end, table, chunks)
    H, G = states.split([key_size, v.shape[3]], dim=-2)
    weights = between * beta.unsqueeze(-2)
    covariance = Covariance(k, weights, start, H, regularizer.to(dtype).unsqueeze(-2))
    x = solve(covariance, q, iterations, backend)
    o = start * (x @ G.mT) + ((x @ k.mT) * weights) @ values
    return MesaOutput(chunks.join(o * scale).to(v.dtype), _split(table, key_size))


def decays(
    log_decay: Tensor | None, beta: Tensor, chunks: MiniBatches, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """start [.., C, 1], between [.., C, C] (0 for j > i) and end [.., C]: what is left at the end.

    Each pair has its own sum of logs: a reset (-inf) is exact and costs its neighbours no digits.
    """
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    log_decay = chunks.cut(log_decay.expand(beta.shape).to(dtype))
    start = log_decay.cumsum(-1).exp().unsqueeze(-1)
    size = log_decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    summed = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).masked_fill(~later, 0)
    between = summed.cumsum(-2).exp().tril()
    return start, between, between[..., -1, :]


def chunk_states(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    start: Tensor,
    end: Tensor,
    table: Tensor,
    chunks: MiniBatches,
) -> tuple[Tensor, Tensor]:
    """[H; G] before each chunk [M, R, HV, K + V, K], and after each sequence [N, HV, K + V, K].

    S <- start_C S + sum_j end_j beta_j [k_j; v_j] k_j^T
    """
    written = (torch.cat([k, v], dim=-1) * (beta * end).unsqueeze(-1)).mT @ k
    kept = start[..., -1:, :]
    table, states = chunks.table(table), []
    for step in range(chunks.steps):
        states.append(chunks.rows_at(step, table))
        table = chunks.write_at(step, table, kept[step] * states[step] + written[step])
    return torch.stack(states), chunks.states(table)


def _initial(state: MesaState | None, covariance: Tensor, values: Tensor) -> Tensor:
    """[H; G] of each sequence in one tensor, because one recurrence carries both."""
    return torch.cat([covariance, values] if state is None else list(state), dim=-2)


def _split(table: Tensor, key_size: int) -> MesaState:
    return MesaState(table[..., :key_size, :].clone(), table[..., key_size:, :].clone())
