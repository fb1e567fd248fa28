"""The operator for every system whose memory is one filter over all that came before."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltarule.ops.checks import check_state
from deltarule.ops.dispatch import Implementation, Table, always
from deltarule.ops.few_tokens import decodes
from deltarule.ops.history import last_rows, sequence_of, token_rows, with_history
from deltarule.ops.long_convolution import definition as reference
from deltarule.ops.long_convolution.inputs import check_convolution
from deltarule.ops.long_convolution.torch import operator
from deltarule.ops.plain import count_sequences, run_plain
from deltarule.shapes import Keys, Offsets, Queries, RecurrentOutput, Values


def long_convolution(
    v: Values,
    taps: Float[Tensor, "H L"],
    *,
    q: Queries | None = None,
    k: Keys | None = None,
    initial_state: Float[Tensor, "N R H C"] | None = None,
    lengths: Int[Tensor, "B"] | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    impl: Literal["auto", "reference", "torch"] = "auto",
) -> RecurrentOutput:
    r"""Weigh each earlier token by how long ago it was, with one filter for each head.

    .. math::
        o_t = \sum_{j=0}^{L-1} \mathrm{taps}_j \, (q_t^\top k_{t-j}) \, v_{t-j}

    Without q and k their product is 1: a plain causal convolution of the values. A skip d v_t is
    d added to the first tap.

    Args:
        v: Values [B, T, H, V] in float64, float32, bfloat16 or float16.
        taps: The filter of each head [H, L], from the token itself to L - 1 tokens back; computed
            with in float32 at least.
        q: Queries [B, T, H, K] in v's dtype. None, with k, means 1.
        k: Keys [B, T, H, K] in v's dtype.
        initial_state: The last L - 1 tokens before these, newest last: [N, L - 1, H, K + V], keys
            beside values, float32 (float64 with float64 v). None means zeros.
        lengths: [B] int64, the number of real tokens at the front of each row; outputs at the
            others mean nothing. None means all.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1), from 0 to T; see
            `deltarule.pack`. None means that each batch row is a sequence.
        return_state: False gives None in place of the final state.
        impl: "auto", "torch" or "reference".

    Returns:
        o [B, T, H, V] in v's dtype, and final_state like initial_state, always a new tensor. With
        keys of two or more channels a NaN in a token reaches the earlier ones of its 128, except
        in the reference.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> v, taps = torch.zeros(1, 5, 1, 1), torch.tensor([[1.0, 0.5, 0.25]])
        >>> v[0, 1] = 1.0
        >>> long_convolution(v, taps).o.flatten().tolist()
        [0.0, 1.0, 0.5, 0.25, 0.0]

    Source: Hyena, arXiv 2302.10866, section 3; of outer products, arXiv 2310.18780, section 4.
    """
    check_convolution(v, taps, q, k)
    channels = v.shape[3] + (0 if k is None else k.shape[3])
    # What came before: one row for every tap but that of the token itself.
    size = count_sequences(v, lengths, cu_seqlens), taps.shape[1] - 1, v.shape[2], channels
    check_state("initial_state", initial_state, v, size, "[N, L - 1, H, K + V]")
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(v.device)
    call = Convolution(v, taps, q, k, initial_state, lengths, cu_seqlens)
    # On a GPU, too, the fast form is that of PyTorch: its FFT and its products are kernels.
    impl = "torch" if impl == "auto" else impl
    return run_plain(IMPLEMENTATIONS, call, impl, v.device, return_state)


class Convolution(NamedTuple):
    """One call: the arguments of `long_convolution`, checked."""

    v: Tensor
    taps: Tensor
    q: Tensor | None
    k: Tensor | None
    initial_state: Tensor | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None

    def run(self) -> RecurrentOutput:
        """Outputs, by FFT of halves, or by products where keys are wide; and the last rows."""
        v, history = self.v, self.initial_state
        written = v if self.k is None else torch.cat([self.k, v], dim=-1)
        wide = written.to(torch.promote_types(v.dtype, torch.float32))
        sequences = v.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        zeros = wide.new_zeros(sequences, self.taps.shape[1] - 1, *wide.shape[2:])
        before = zeros if history is None else history
        state = last_rows(wide, before, self.lengths, self.cu_seqlens)
        others = self.taps, self.q, self.k, history
        if history is None:
            o = operator(v, self.taps, self.q, self.k, self.cu_seqlens)
        elif decodes(v, self.cu_seqlens, others):
            o = self.step(torch.cat([history, wide], dim=1))
        else:
            q, k = (None if x is None else x.to(wide.dtype) for x in (self.q, self.k))
            o = operator(wide[..., -v.shape[-1] :], self.taps, q, k, self.cu_seqlens)
            o = (o + self.of_history(history, wide)).to(v.dtype)
        return RecurrentOutput(o, state)

    def of_history(self, history: Tensor, wide: Tensor) -> Tensor:
        """What the tokens read of the rows before them: a sum beside theirs, exactly 0 of zeros."""
        split, offsets, reach = wide.shape[-1] - self.v.shape[-1], self.cu_seqlens, history.shape[1]
        sequence = None if offsets is None else sequence_of(offsets, wide.shape[1])
        rows = with_history(torch.zeros_like(wide), history, offsets, sequence)
        q = k = None
        if self.q is not None:
            nothing = torch.zeros_like(history[..., :split])
            q = with_history(self.q.to(wide.dtype), nothing, offsets, sequence)
            k = rows[..., :split]
        if offsets is not None:
            offsets = offsets + torch.arange(len(offsets), device=offsets.device) * reach
        o = operator(rows[..., split:], self.taps, q, k, offsets)
        return o[:, reach:] if sequence is None else o.index_select(1, token_rows(sequence, reach))

    def step(self, rows: Tensor) -> Tensor:
        """A few tokens, each the sum over the L rows that it sees, of [B, R + T, H, K + V]."""
        size, split = self.taps.shape[1], rows.shape[-1] - self.v.shape[-1]
        seen = rows.unfold(1, size, 1)
        weight = self.taps.to(rows.dtype).flip(-1)
        if self.q is not None:
            scores = torch.einsum(
                "bthk, bthkl -> bthl", self.q.to(rows.dtype), seen[..., :split, :]
            )
            weight = weight * scores
        o = (seen[..., split:, :] * weight.unsqueeze(-2)).sum(-1)
        return o.to(self.v.dtype)


IMPLEMENTATIONS: Table[Convolution, RecurrentOutput] = {
    "torch": Implementation(always, Convolution.run),
    "reference": Implementation(always, reference.long_convolution),
}
