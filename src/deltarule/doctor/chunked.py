"""The yardstick: the algorithm of the kernels, whole chunks of tokens at once, written plainly.

Inside a chunk that starts in state S, let g_i be the decay from the start to row i, e(j, i) the
decay between rows j and i, and g_C the decay of the whole chunk. Every write is a column of

    X = (I - L)^-1 (F + E S^T)              corrected_values
    O = scale * (Q' S^T + P X)              chunk_output
    S <- S Diag(g_C) + X^T Y'               next_state

with pair_scores L_ij = sum_c e_ic y_jc e(j, i)_c for j < i, and P_ij of q and y for j <= i.

    erase    L                       F              E            Y
    none     0                       v              0            k
    tied     -beta k against k       beta v         -beta k g    k
    free     a against b             (a against k) v   a g       b, and k with X = v

The free erase reads the state before the decay of its own row, so its e(j, i) and g_i leave row i
out. `matmul_dtype` rounds every operand of a matrix product, backward too, and nothing else: a
kernel in that precision cannot avoid this error, and is judged by multiples of it.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltarule.ops.delta_rule.definition import unit_norm
from deltarule.shapes import RecurrentOutput

# The arguments of a call of the operator, whose checks are not of this file.
Inputs = Any
Round = Callable[[Tensor], Tensor]
# Values x that rows write along keys y, once the state at the chunk's start is known.
Written = tuple[Tensor, Tensor]


class Write(NamedTuple):
    """The rows of a chunk write X = x0 + from_state S^T along the keys y."""

    x0: Tensor
    from_state: Tensor | None
    y: Tensor


def run(
    inputs: Inputs, chunk_size: int = 16, matmul_dtype: torch.dtype | None = None
) -> RecurrentOutput:
    """Compute what the definition does, `chunk_size` tokens at a time.

    The state goes from chunk to chunk of each sequence: a batch row, or a packed slice.
    """
    q, k, v, beta, a, b, log_decay, initial_state, cu_seqlens, n_steps, scale, *_ = inputs
    if inputs.normalize_qk:
        q, k = unit_norm(q), unit_norm(k)
    batch, tokens, heads, _ = inputs.output_shape
    queries = per_value_head(q, heads) * scale
    rows = {"k": per_value_head(k, heads), "v": heads_first(v)}
    if beta is not None:
        rows["beta"] = heads_first(beta.unsqueeze(-1))
    if a is not None and b is not None:
        rows |= {"a": heads_first(a), "b": heads_first(b)}
    # Token t's decay at row t * n, its query at row t * n + n - 1, zeros in its other rows.
    rows["q"] = pad(queries.unsqueeze(-2), (0, 0, n_steps - 1, 0)).flatten(-3, -2)
    decay = decay_per_head(log_decay, queries).unsqueeze(-2)
    decay = pad(decay, (0, 0, 0, n_steps - 1)).flatten(-3, -2)
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    if initial_state is None:
        initial_state = queries.new_zeros(inputs.state_shape)

    def rounded(x: Tensor) -> Tensor:
        return x if matmul_dtype is None else x.to(matmul_dtype).to(x.dtype)

    outputs, final_states = [queries.new_zeros(batch, heads, 0, v.shape[3])], []
    initial_state = initial_state.to(queries.dtype)
    for i, (first, last) in enumerate(pairwise(bounds)):
        state = initial_state if cu_seqlens is None else initial_state[i : i + 1]
        for start in range(first, last, chunk_size):
            here = slice(start * n_steps, min(start + chunk_size, last) * n_steps)
            part = {name: x[..., here, :] for name, x in rows.items()}
            chunk_decay = decay[..., here, :]
            written = [
                (x0 if w is None else x0 + rounded(w) @ rounded(state).mT, y)
                for x0, w, y in writes_of(part, chunk_decay, rounded)
            ]
            o = chunk_output(part["q"], state, written, chunk_decay, rounded)
            outputs.append(o[..., n_steps - 1 :: n_steps, :])
            state = next_state(state, written, chunk_decay, rounded)
        final_states.append(state)
    o = torch.cat(outputs, dim=-2).transpose(1, 2).to(v.dtype)
    return RecurrentOutput(o, torch.cat([initial_state[:0], *final_states]))


def writes_of(part: dict[str, Tensor], log_decay: Tensor, rounded: Round) -> list[Write]:
    """What the rows of a chunk write, by the erase that there is."""
    k, v = part["k"], part["v"]
    if "beta" in part:
        beta = part["beta"]
        scores = pair_scores(rounded(k), rounded(k), decay_between(log_decay), -1)
        erased = -beta * k * decay_from_start(log_decay)
        return [Write(*corrected_values(-beta * scores, beta * v, erased, rounded), k)]
    if "a" in part:
        a, b = part["a"], part["b"]
        before = decay_between(log_decay, own_row=False)
        scores = pair_scores(rounded(a), rounded(b), before, -1)
        values = rounded(pair_scores(rounded(a), rounded(k), before, -1)) @ rounded(v)
        erased = a * decay_from_start(log_decay, own_row=False)
        return [
            Write(*corrected_values(scores, values, erased, rounded), b), Write(v, None, k)
        ]  # fmt: skip
    return [Write(v, None, k)]


def decay_between(log_decay: Tensor, own_row: bool = True) -> Tensor:
    """exp(sum of log_decay over j < s <= i, or j < s < i): [.., R, K] -> [.., R, R, K].

    Each sum is its own: a difference of two cumulative sums loses digits after a strong decay and
    is inf - inf after a reset. Rows i < j hold nothing.
    """
    size = log_decay.shape[-2]
    after = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    steps = log_decay.unsqueeze(-2).expand(*log_decay.shape[:-1], size, log_decay.shape[-1])
    sums = steps.masked_fill(~after[..., None], 0.0).cumsum(-3)
    if not own_row:
        sums = torch.cat([torch.zeros_like(sums[..., :1, :, :]), sums[..., :-1, :, :]], dim=-3)
    return sums.exp()


def decay_from_start(log_decay: Tensor, own_row: bool = True) -> Tensor:
    """exp(sum of log_decay from the start of the chunk to row i, with or without row i)."""
    sums = log_decay.cumsum(-2)
    if not own_row:
        sums = torch.cat([torch.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], dim=-2)
    return sums.exp()


def pair_scores(x: Tensor, y: Tensor, between: Tensor, diagonal: int) -> Tensor:
    """sum_c x_ic y_jc e(j, i)_c for j <= i + diagonal: x and y [.., R, K] -> [.., R, R]."""
    if between.shape[-1] == 1:
        return ((x @ y.mT) * between.squeeze(-1)).tril(diagonal)
    return torch.einsum("...ic,...jc,...ijc->...ij", x, y, between).tril(diagonal)


def corrected_values(
    scores: Tensor, values: Tensor, from_state: Tensor, rounded: Round
) -> tuple[Tensor, Tensor]:
    """(I - L)^-1 F and (I - L)^-1 E: what each row writes once the rows before it have written."""
    identity = torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    inverse = rounded(torch.linalg.solve_triangular(identity - scores, identity, upper=False))
    return inverse @ rounded(values), inverse @ rounded(from_state)


def chunk_output(
    q: Tensor, state: Tensor, writes: list[Written], log_decay: Tensor, rounded: Round
) -> Tensor:
    """(q_i g_i) S^T + sum_j P_ij x_j."""
    o = rounded(q * decay_from_start(log_decay)) @ rounded(state).mT
    between = decay_between(log_decay)
    for x, y in writes:
        o = o + rounded(pair_scores(rounded(q), rounded(y), between, 0)) @ rounded(x)
    return o


def next_state(state: Tensor, writes: list[Written], log_decay: Tensor, rounded: Round) -> Tensor:
    """S Diag(g_C) + sum_j x_j (y_j e(j, C))^T."""
    state = decayed(state, log_decay.sum(-2, keepdim=True).exp(), rounded)
    to_end = decay_from_start(log_decay.flip(-2), own_row=False).flip(-2)
    for x, y in writes:
        state = state + rounded(x).mT @ rounded(y * to_end)
    return state


def decayed(state: Tensor, decay: Tensor, rounded: Round) -> Tensor:
    """S Diag(g_C), and in its gradient by g_C rounded operands.

    That is a product too: of S with the gradient by the next state, over all rows of the state.
    """
    zero = decay - decay.detach()
    return state * decay + rounded(rounded(state) * zero) - state * zero


def heads_first(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)


def per_value_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, H, K] -> [B, HV, T, K]: value head h reads key head h * H // HV."""
    return heads_first(x).repeat_interleave(heads // x.shape[2], dim=1)


def decay_per_head(log_decay: Tensor | None, like: Tensor) -> Tensor:
    """Expand any form of log_decay to [B, HV, T, 1 or K]."""
    batch, heads, tokens, _ = like.shape
    if log_decay is None:
        return like.new_zeros(batch, heads, tokens, 1)
    if log_decay.ndim == 1:
        return log_decay.to(like.dtype)[:, None, None].expand(batch, heads, tokens, 1)
    if log_decay.ndim == 3:
        log_decay = log_decay.unsqueeze(-1)
    return log_decay.to(like.dtype).transpose(1, 2)
