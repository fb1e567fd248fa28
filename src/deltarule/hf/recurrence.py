"""The functions of transformers' delta-rule layers, Mamba-2 and Mamba, on this library's operators.

Gated DeltaNet and KDA keep their state as [N, HV, K, V] there and as [N, HV, V, K] here: the same
memory read in another order, so that nothing is copied from a token to the next.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule import RecurrentOutput, delta_rule, recurrent_step, selective_scan
from deltarule.hf.hooks import AFRESH, NOTE, last_documents, one_row, padding_removed
from deltarule.nn.gates import gate_of
from deltarule.ops import BetaLogits, DecayLogits


class Recurrence(NamedTuple):
    """The arguments of one `delta_rule`, in its names."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | BetaLogits | None
    log_decay: Tensor | DecayLogits
    scale: float | None = None
    normalize_qk: bool = False

    def run(
        self, initial_state: Tensor | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> RecurrentOutput:
        """All tokens; of packed documents the state is that of the last one in each row."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        # The cache overwrites its memory afterwards, which the backward pass would still read.
        copied = torch.is_grad_enabled()
        start = None if initial_state is None else initial_state.to(wide, copy=copied)
        beta, decay = None if self.beta is None else gate_of(self.beta), gate_of(self.log_decay)
        q, k, v = self.q, self.k, self.v
        if cu_seqlens is not None:
            if start is not None:
                raise ValueError(AFRESH)
            q, k, v = map(one_row, (q, k, v))
            beta = None if beta is None else one_row(beta)
            # A constant decay [HV] stays as it is.
            decay = decay if decay.ndim == 1 else one_row(decay)
        out = delta_rule(
            q, k, v, beta=beta, log_decay=decay, scale=self.scale, normalize_qk=self.normalize_qk,
            initial_state=start, cu_seqlens=cu_seqlens, return_state=return_state,
        )  # fmt: skip
        if cu_seqlens is None:
            return out
        (o, state), (batch, tokens) = out, self.v.shape[:2]
        if state is not None:
            state = state[last_documents(cu_seqlens, batch, tokens)]
        return RecurrentOutput(o.unflatten(1, (batch, tokens)).squeeze(0), state)

    def step(self, state: Tensor) -> Tensor | None:
        """One token, the state overwritten; None where a gradient or its dtype is against that."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        if torch.is_grad_enabled() or state.dtype != wide:
            return None
        # Beams and repeated rows are gathered in transformers' order, which no kernel reads.
        rows = state.contiguous() if state.is_cuda and state.stride(-1) != 1 else state
        o = recurrent_step(
            self.q, self.k, self.v, beta=self.beta, log_decay=self.log_decay, scale=self.scale,
            normalize_qk=self.normalize_qk, state=rows,
        )  # fmt: skip
        if rows is not state:
            state.copy_(rows)
        return o


def turned(state: Tensor | None) -> Tensor | None:
    """[N, HV, K, V] <-> [N, HV, V, K], without a copy."""
    return None if state is None else state.transpose(-1, -2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | DecayLogits,
    beta: Tensor | BetaLogits,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet (g [B, T, HV]) or KDA (g [B, T, HV, K]).

    One token without a gradient overwrites the state, which is the cache's own memory.
    """
    call = Recurrence(query, key, value, beta, g, normalize_qk=use_qk_l2norm_in_kernel)
    given = first_given(cu_seqlens, cu_seq_lens_q)
    if initial_state is not None and query.shape[1] == 1 and given is None:
        o = call.step(initial_state.mT)
        if o is not None:
            return o, initial_state if output_final_state else None
    beta, g = padding_removed(NOTE.real, gate_of(beta), gate_of(g))
    call = call._replace(beta=beta, log_decay=g)
    offsets = first_given(given, NOTE.cu_seqlens)
    o, state = call.run(turned(initial_state), offsets, output_final_state)
    return o, turned(state)


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Mamba-2: q = C, k = B, v = dt x, decay exp(A dt), and D x beside the recurrence.

    `chunk_size` and `seq_idx` are transformers' own: the operator chooses its chunks, and the hook
    on the model has turned numbers of sequences into offsets.
    """
    (dt,) = padding_removed(NOTE.real, step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit))
    call = mamba2_recurrence(hidden_states, dt, A, B, C)
    offsets = first_given(cu_seq_lens_q, NOTE.cu_seqlens)
    o, state = call.run(initial_states, offsets, return_final_states)
    o = with_skip_and_gate(o, hidden_states, None if D is None else D.unsqueeze(-1), z)
    return (o, state) if return_final_states else o


def mamba2_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
) -> Tensor:
    """One token of Mamba-2, the state [B, HV, P, N] overwritten.

    hidden_states [B, HV, P]; B and C [B, G, N]; dt, A, D and dt_bias are expanded over channels.
    """
    bias = None if dt_bias is None else dt_bias[..., 0]
    dt = step_sizes(dt[..., 0], bias, dt_softplus)
    x, dt, B, C = (y.unsqueeze(1) for y in (hidden_states, dt, B, C))
    call = mamba2_recurrence(x, dt, A[:, 0, 0], B, C)
    o = call.step(state)
    if o is None:
        o, after = call.run(state, None, True)
        assert after is not None
        state.copy_(after)
    return with_skip_and_gate(o[:, 0], hidden_states, D, z)


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba over a whole sequence, channels before tokens: one head of all value channels.

    hidden_states, dt and z [B, I, T]; A [I, N]; B and C [B, N, T]; the last state [B, I, N].
    """
    x = hidden_states.transpose(1, 2)
    batch, tokens, _ = x.shape
    (dt,) = padding_removed(NOTE.real, step_sizes(dt.transpose(1, 2), delta_bias, delta_softplus))
    q, k = (y.transpose(1, 2).unsqueeze(2).to(x.dtype) for y in (C, B))
    v, delta = (x * dt).to(x.dtype).unsqueeze(2), dt.unsqueeze(2)
    offsets = first_given(cu_seq_lens_q, NOTE.cu_seqlens)
    if offsets is not None:
        q, k, v, delta = map(one_row, (q, k, v, delta))
    wide = torch.promote_types(x.dtype, torch.float32)
    o, state = selective_scan(
        q, k, v, delta=delta, A=A.to(wide).unsqueeze(0), scale=1.0, cu_seqlens=offsets,
        return_state=return_last_state,
    )  # fmt: skip
    o = o.reshape(batch, tokens, -1).transpose(1, 2)
    o = with_skip_and_gate(o, hidden_states, None if D is None else D.unsqueeze(-1), z)
    if state is None:
        return o
    state = state if offsets is None else state[last_documents(offsets, batch, tokens)]
    return o, state[:, 0]


def mamba2_recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Recurrence:
    """v = dt x and log_decay = A dt, from step sizes [B, T, HV] that are ready."""
    v = (x * dt.unsqueeze(-1)).to(x.dtype)
    return Recurrence(C, B, v, None, A.to(dt.dtype) * dt, scale=1.0)


def step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Add the bias and apply softplus in float32: low precision rounds small steps to nothing."""
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def with_skip_and_gate(o: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(o + D x) * SiLU(z), each if it is there."""
    o = o if D is None else torch.addcmul(o, D, x)
    return (o if z is None else o * F.silu(z)).to(x.dtype)


def first_given(*choices: Tensor | None) -> Tensor | None:
    return next((choice for choice in choices if choice is not None), None)
