"""`mesa` by chunks: no K x K matrix for a token, only one for the start of each chunk.

With start_i the decay from the chunk's start to token i, and between_ij that from token j to i,

    H_i x = start_i H_0 x + sum_{j <= i} between_ij beta_j (k_j . x) k_j
    G_i x = start_i G_0 x + sum_{j <= i} between_ij beta_j (k_j . x) v_j

so a step of the conjugate gradients for all tokens of all chunks is four matrix products.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.chunks import chunk_size
from deltarule.ops.mini_batches import MiniBatches, lay_out
from deltarule.ops.operators import Operator, is_dual
from deltarule.ops.plain import Arguments
from deltarule.ops.registration import Backward, Gradients, Rules
from deltarule.shapes import MesaOutput, MesaState

# The solution of the linear systems of `mesa`, one for each token, and its gradient.
#
# The gradient is that of the solution, not of the iterations: with A = H + Diag(regularizer),
# A x = q gives dq = A^{-1} dx and dA = -dq x^T, for which the same solver runs once more. Nothing
# of the iterations is kept, whatever their number; they must be enough to have converged.


class Systems(NamedTuple):
    """A x = b of all tokens, A = H + Diag(regularizer) as what it takes to multiply with it."""

    b: Tensor
    k: Tensor  # [M, R, HV, C, K]
    weights: Tensor  # between_ij beta_j, 0 for j > i: [M, R, HV, C, C]
    start: Tensor  # [M, R, HV, C, 1]
    H: Tensor  # at the start of the chunk, [M, R, HV, K, K]
    regularizer: Tensor  # [HV, 1, K]
    x: Tensor | None  # where it is known already
    iterations: int | None
    backend: str

    def times(self, x: Tensor) -> Tensor:
        recent = ((x @ self.k.mT) * self.weights) @ self.k
        return self.start * (x @ self.H.mT) + recent + self.regularizer * x


def solve(given: Systems) -> Tensor:
    """x_i of (H_i + Diag(regularizer)) x_i = b_i for all tokens, with the gradient of a solution.

    x stands outside the graph; the residual b - A x, which is 0 up to rounding, is inside it, and
    A^{-1} applied to it is what the gradient passes through.
    """
    if torch.autograd.forward_ad._current_level >= 0 and any(map(is_dual, given[:6])):
        raise NotImplementedError(solution.message)
    with torch.no_grad():
        b, *detached = [y.detach() for y in given[:6]]
        x = solution(b, *detached, *given[6:])
    if not torch.is_grad_enabled():
        return x
    return solution(given.b - given.times(x), *detached, x, *given[7:])


def conjugate_gradients(given: Systems, iterations: int) -> Tensor:
    tiny = torch.finfo(given.b.dtype).tiny
    x, r, p = torch.zeros_like(given.b), given.b, given.b
    size = r.square().sum(-1, keepdim=True)
    for _ in range(iterations):
        image = given.times(p)
        step = size / (p * image).sum(-1, keepdim=True).clamp(min=tiny)
        x, r = x + step * p, r - step * image
        before, size = size, r.square().sum(-1, keepdim=True)
        p = r + size / before.clamp(min=tiny) * p
    return x


def exact(given: Systems) -> Tensor:
    """One token of every chunk at a time: as many K x K matrices as there are chunks."""
    b, k, weights, start, H, regularizer, *_ = given
    ridge = regularizer.squeeze(-2).diag_embed()
    solutions = []
    for i in range(b.shape[-2]):
        recent = (k * weights[..., i, :].unsqueeze(-1)).mT @ k
        A = start[..., i : i + 1, :] * H + recent + ridge
        solutions.append(torch.linalg.solve_ex(A, b[..., i, :]).result)
    return torch.stack(solutions, dim=-2)


def solved(given: Systems) -> Tensor:
    """The hot stage: conjugate gradients, or with None the exact solution."""
    if given.iterations is None:
        return exact(given)
    if given.backend == "torch":
        return conjugate_gradients(given, given.iterations)
    # Triton is an extra, imported where it runs.
    from deltarule.ops.mesa import triton as kernels

    return kernels.conjugate_gradients(given, given.iterations)


def solution_forward(inputs: Systems) -> tuple[Tensor]:
    x = solved(inputs) if inputs.x is None else inputs.x.clone()
    return (x.contiguous(),)


def solution_backward(given: Backward[Systems]) -> Gradients:
    """A^{-1} dx, as A is symmetric; a second derivative would need that of A."""
    (d_x,), inputs = given.gradients, given.inputs
    assert d_x is not None
    return (solved(inputs._replace(b=d_x)),)


rules = Rules(gradients=("b",), forgotten=("b", "x"), otherwise='use impl="reference"')
solution: Operator[Systems] = Operator(
    "mesa_solution", Systems, solution_forward, solution_backward,
    lambda given: (torch.empty_like(given.b, memory_format=torch.contiguous_format),), rules=rules,
)  # fmt: skip


def mesa(given: Arguments, backend: str) -> MesaOutput:
    """Outputs and final state, in float32 or float64, of what the operator has checked.

    `backend` is that of the conjugate gradients, "torch" or "triton".
    """
    q, k, v, beta, log_decay = (given[name] for name in ("q", "k", "v", "beta", "log_decay"))
    state, cu_seqlens = given["initial_state"], given["cu_seqlens"]
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, tokens, _, key_size = q.shape
    heads = v.shape[2]
    # One recurrence carries both, as [H; G] of each sequence.
    table = torch.cat(state, dim=-2)
    if tokens == 0 or batch == 0:
        return MesaOutput(v.clone(), _split(table, key_size))
    size = chunk_size(tokens, None if cu_seqlens is None else len(table))
    chunks = lay_out(q, size, cu_seqlens=cu_seqlens)
    q, k, values = (chunks.cut(x.to(dtype)) for x in (q, k, v))
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    start, between, end = decays(log_decay, beta, chunks, dtype)
    beta = chunks.cut(beta.to(dtype))
    states, table = chunk_states(k, values, beta, start, end, table, chunks)
    H, G = states.split([key_size, v.shape[3]], dim=-2)
    weights = between * beta.unsqueeze(-2)
    ridge = given["regularizer"].to(dtype).unsqueeze(-2)
    x = solve(Systems(q, k, weights, start, H, ridge, None, given["iterations"], backend))
    o = start * (x @ G.mT) + ((x @ k.mT) * weights) @ values
    return MesaOutput(chunks.join(o * given["scale"]).to(v.dtype), _split(table, key_size))


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
    k: Tensor, v: Tensor, beta: Tensor, start: Tensor, end: Tensor, table: Tensor,
    chunks: MiniBatches,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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


def _split(table: Tensor, key_size: int) -> MesaState:
    return MesaState(table[..., :key_size, :].clone(), table[..., key_size:, :].clone())


def mesa_step(given: Arguments, backend: str) -> MesaOutput:
    """A few tokens, one after another, for sums without a gradient.

    H <- g_t H + beta_t k_t k_t^T        G <- g_t G + beta_t v_t k_t^T
    o_t = scale * G (H + Diag(regularizer))^{-1} q_t
    """
    q, k, v, beta, log_decay = (given[name] for name in ("q", "k", "v", "beta", "log_decay"))
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, tokens, heads, _ = v.shape
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    values, weight = v.to(dtype).unsqueeze(-1), beta.to(dtype)[..., None, None]
    decay = None if log_decay is None else log_decay.to(dtype).expand(beta.shape).exp()
    ridge = given["regularizer"].to(dtype).unsqueeze(-2)
    (H, G), outputs, one = given["initial_state"], [], q.new_ones(1).expand(batch, 1, heads, 1, 1)
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
        x = solution(query, *of_key, None, given["iterations"], backend)
        outputs.append((G @ x[:, 0].mT).squeeze(-1))
    o = torch.stack(outputs, dim=1) * given["scale"]
    return MesaOutput(o.to(v.dtype), MesaState(H, G))
