"""The scan of transformers' Mamba layers on `selective_scan`: one head of all value channels."""

import torch
from torch import Tensor

from deltarule import selective_scan
from deltarule.hf.call import NOTE, last_documents, one_row, padding_removed
from deltarule.hf.recurrence import first_given, step_sizes, with_skip_and_gate


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
    """Mamba over a whole sequence, channels before tokens.

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
