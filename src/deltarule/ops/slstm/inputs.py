"""The arguments of `slstm` as the registered operator takes them, and where its sequences lie."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.history import sequence_of


class SLSTMInputs(NamedTuple):
    """Gates [B, T, H, 4, D], recurrent weights [H, 4, D, D], a state [N, H, 4, D], and ends."""

    gates: Tensor
    recurrent: Tensor
    before: Tensor
    lengths: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.gates.dtype, torch.float32)

    @property
    def spans(self) -> tuple[Tensor, Tensor]:
        """[N] the first row of each sequence among all B T, and its tokens."""
        batch, tokens = self.gates.shape[:2]
        device = self.gates.device
        if self.cu_seqlens is not None:
            offsets = self.cu_seqlens.to(device, torch.int64)
            return offsets[:-1], offsets.diff()
        first = torch.arange(batch, device=device) * tokens
        return first, torch.full_like(first, tokens) if self.lengths is None else self.lengths

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """[B T] the sequence of each row, and how many tokens of it come before."""
        batch, tokens = self.gates.shape[:2]
        row = torch.arange(batch * tokens, device=self.gates.device)
        if self.cu_seqlens is None:
            return row // max(tokens, 1), row % max(tokens, 1)
        first, _ = self.spans
        sequence = sequence_of(self.cu_seqlens.to(row.device), tokens)
        return sequence, row - first[sequence]
